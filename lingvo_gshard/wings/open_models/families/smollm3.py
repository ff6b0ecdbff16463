"""SmolLM3: every fourth layer has no rotations (https://huggingface.co/blog/smollm3)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FEED_FORWARD_BIAS,
    FULL,
    SLIDING,
    Family,
    attention_of_layers,
    attentions_by_type,
    set_pattern,
    types_of_layers,
    windows_config,
)

_SETTINGS = (BIASES, FEED_FORWARD_BIAS)
_UNROTATED = ", unrotated"
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config, *_SETTINGS)
    # A key of Qwen2's class, which no layer reads.
    config.get("max_window_layers", None)
    attentions = attentions_by_type(config, task.decoder.layer.self_attention)
    for kind, attention in tuple(attentions.items()):
        attentions[kind + _UNROTATED] = attention.copy().set(rotary_fraction=0.0)
    set_pattern(config, task.decoder, _kinds(config), attentions)
    return task


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention, and whether it has no rotations.

    Raises:
      UserError: a list has the wrong length.
    """
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval")
    usual = [int((index + 1) % interval != 0) for index in range(layers)]
    rotated = config.get("no_rope_layers", usual, list)
    has_windows = config.get("use_sliding_window", False) and config.is_given("sliding_window")
    kinds = [SLIDING if has_windows and not rotates else FULL for rotates in rotated]
    if len(rotated) != layers:
        raise UserError(
            f"{config.where}: no_rope_layers has {len(rotated)} entries for {layers} layers"
        )
    kinds = types_of_layers(config, kinds)
    return [
        kind if rotates else f"{kind}{_UNROTATED}"
        for kind, rotates in zip(kinds, rotated, strict=True)
    ]


def _config(task: Params) -> dict[str, Any]:
    layers = attention_of_layers(task.decoder)
    return {
        **decoder_config(task, *_SETTINGS),
        **windows_config(task.decoder),
        "no_rope_layers": [int(bool(each.rotary_fraction)) for each in layers],
    }


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    table=DECODER,
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
