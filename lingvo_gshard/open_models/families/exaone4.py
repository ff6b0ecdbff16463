"""EXAONE 4.0: norms at the outputs of sublayers; only windows rotate (arXiv 2507.11407)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    HEAD_NORMS,
    OUTPUT_NORMS,
    decoder_config,
    decoder_task,
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
    sliding_window,
    window_config,
)

_PERIOD = 4
_DEFAULTS = DECODER_DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
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
    attention.query_key_norm.epsilon = config.get("rms_norm_eps", kind=float)
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
    return {
        **decoder_config(task),
        "sliding_window": window_config(pattern_of(task.decoder)),
        "layer_types": pattern_config(task.decoder),
    }


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *HEAD_NORMS, *OUTPUT_NORMS, *FEED_FORWARD),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
