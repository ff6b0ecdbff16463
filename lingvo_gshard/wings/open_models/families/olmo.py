"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms at the outputs of sublayers, and over all heads."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    OUTPUT_NORMS,
    plain_config,
    plain_task,
    set_heads_norm,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    SLIDING,
    Family,
    layer_types,
    pattern_of,
    set_pattern,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import (
    rope_config,
    ropes_config,
    rotated_by_type,
    set_rope,
)

_TABLE = (*DECODER, *OUTPUT_NORMS)
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50304,
}
# The base of OLMo 3's rotations. transformers gives `rope_theta` to layers with full attention.
_BASE = 5e5
_OLMO3_DEFAULTS = _DEFAULTS | {"rope_theta": _BASE, "sliding_window": 4096}


def _common(config: PublishedConfig) -> Params:
    """Returns what OLMo 2 and 3 share, with an attention that has no rotation."""
    config.expect("hidden_act", "silu")
    task = plain_task(config, BIASES)
    task.decoder.layer.norm_position = "output"
    set_heads_norm(task)
    return task


def _common_config(task: Params) -> dict[str, Any]:
    return {**plain_config(task, BIASES), "hidden_act": "silu"}


def _olmo2_task(config: PublishedConfig) -> Params:
    task = _common(config)
    set_rope(config, task.decoder.layer.self_attention, config.rope())
    return task


def _olmo2_config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), **rope_config(task.decoder.layer.self_attention)}


def _olmo3_task(config: PublishedConfig) -> Params:
    task = _common(config)
    bases = {FULL: config.get("rope_theta", None, float), SLIDING: _BASE}
    attentions = rotated_by_type(config, task.decoder.layer.self_attention, bases)
    set_pattern(config, task.decoder, layer_types(config, period=4), attentions)
    return task


def _olmo3_config(task: Params) -> dict[str, Any]:
    pattern = pattern_of(task.decoder)
    return {
        **_common_config(task),
        **ropes_config(pattern, {FULL: _BASE, SLIDING: _BASE}),
        **windows_config(task.decoder),
    }


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    table=_TABLE,
    read_task=_olmo2_task,
    config_of=_olmo2_config,
    defaults=_DEFAULTS,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    table=_TABLE,
    read_task=_olmo3_task,
    config_of=_olmo3_config,
    defaults=_OLMO3_DEFAULTS,
)
