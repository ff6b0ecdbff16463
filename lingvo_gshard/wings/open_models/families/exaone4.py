"""EXAONE 4.0: norms at the outputs of sublayers; only windows rotate (arXiv 2507.11407)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    OUTPUT_NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.family import (
    FULL,
    SLIDING,
    Family,
    attentions_by_type,
    layer_types,
    set_pattern,
    sliding_window,
    windows_config,
)

_PERIOD = 4
_DEFAULTS = DECODER_DEFAULTS | {
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": _PERIOD,
    "vocab_size": 102400,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    task.decoder.layer.norm_position = "output"
    attention = task.decoder.layer.self_attention
    attention.qk_norm = True
    attention.query_key_norm.epsilon = task.decoder.layer.norm.epsilon
    attentions = attentions_by_type(config, attention)
    if SLIDING in attentions:
        attentions[FULL].rotary_fraction = 0.0
    set_pattern(config, task.decoder, layer_types(config, _period(config)), attentions)
    return task


def _period(config: PublishedConfig) -> int:
    """Returns the layers of a period. Every layer has full attention if there is no window."""
    if config.is_given("layer_types"):
        # Published files also have the pattern as a text, such as LLLG.
        config.get("sliding_window_pattern", None)
        return _PERIOD
    period = config.get("sliding_window_pattern", _PERIOD, least=1)
    return period if sliding_window(config) else 1


def _config(task: Params) -> dict[str, Any]:
    return {**decoder_config(task), **windows_config(task.decoder)}


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    table=(*DECODER, *OUTPUT_NORMS),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
