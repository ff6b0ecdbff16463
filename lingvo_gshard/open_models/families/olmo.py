"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms at the outputs of sublayers, and over all heads."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.norm import HeadsRMSNorm
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    HEADS_NORMS,
    OUTPUT_NORMS,
    plain_config,
    plain_task,
)
from lingvo_gshard.open_models.families.family import (
    FULL,
    SLIDING,
    Family,
    attentions_by_type,
    layer_types,
    pattern_config,
    pattern_of,
    set_pattern,
    window_config,
)
from lingvo_gshard.open_models.families.rope import (
    rope_config,
    ropes_by_type,
    ropes_config,
    set_rope,
)

_TABLE = (
    *EMBEDDINGS,
    *ATTENTION,
    *ATTENTION_BIASES,
    *HEADS_NORMS,
    *OUTPUT_NORMS,
    *FEED_FORWARD,
)
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50304,
}
# The base of OLMo 3's rotations. transformers gives `rope_theta` to layers with full attention.
_BASE = 5e5
_OLMO3_DEFAULTS = _DEFAULTS | {"rope_theta": _BASE, "sliding_window": 4096}


def _common(config: PublishedConfig) -> Params:
    """Returns what OLMo 2 and 3 share, with an attention that has no rotation."""
    config.expect("hidden_act", "silu")
    task = plain_task(config)
    layer, has_bias = task.decoder.layer, config.get("attention_bias", False)
    layer.norm_position = "output"
    layer.self_attention.set(
        use_bias=has_bias,
        use_output_bias=has_bias,
        qk_norm=True,
        query_key_norm=HeadsRMSNorm.params().set(epsilon=config.get("rms_norm_eps", kind=float)),
    )
    return task


def _common_config(task: Params) -> dict[str, Any]:
    has_bias = pattern_of(task.decoder)[0].use_bias
    return {**plain_config(task), "hidden_act": "silu", "attention_bias": has_bias}


def _olmo2_task(config: PublishedConfig) -> Params:
    task = _common(config)
    set_rope(config, task.decoder.layer.self_attention, config.rope())
    return task


def _olmo2_config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), **rope_config(task.decoder.layer.self_attention)}


def _olmo3_task(config: PublishedConfig) -> Params:
    task = _common(config)
    ropes = ropes_by_type(config, {FULL: config.get("rope_theta", None, float), SLIDING: _BASE})
    attentions = attentions_by_type(config, task.decoder.layer.self_attention)
    for kind, attention in attentions.items():
        set_rope(config, attention, ropes[kind])
    set_pattern(config, task.decoder, layer_types(config, period=4), attentions)
    return task


def _olmo3_config(task: Params) -> dict[str, Any]:
    pattern = pattern_of(task.decoder)
    return {
        **_common_config(task),
        **ropes_config(pattern, {FULL: _BASE, SLIDING: _BASE}),
        "sliding_window": window_config(pattern),
        "layer_types": pattern_config(task.decoder),
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
