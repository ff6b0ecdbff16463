"""SmolLM3: every fourth layer has no rotations (https://huggingface.co/blog/smollm3)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder

_UNROTATED = ", unrotated"


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention, with and without rotations."""
    attentions = family.attentions_by_type(config, attention)
    for kind, each in tuple(attentions.items()):
        attentions[kind + _UNROTATED] = each.copy().set(rotary_fraction=0.0)
    return attentions


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention, and whether it has no rotations.

    Raises:
      UserError: a list has the wrong length.
    """
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval")
    usual = [int((index + 1) % interval != 0) for index in range(layers)]
    rotated = family.types_of_layers(config, usual, "no_rope_layers", may_be_longer=True)
    has_windows = config.get("use_sliding_window", False) and config.is_given("sliding_window")
    kinds = [family.SLIDING if has_windows and not rotates else family.FULL for rotates in rotated]
    kinds = family.types_of_layers(config, kinds)
    return [
        kind if rotates else f"{kind}{_UNROTATED}"
        for kind, rotates in zip(kinds, rotated, strict=True)
    ]


def _layers_config(task: Params) -> dict[str, Any]:
    layers = family.attention_of_layers(task.decoder)
    rotated = [int(bool(each.rotary_fraction)) for each in layers]
    return {**family.windows_config(task.decoder), "no_rope_layers": rotated}


FAMILY = decoder(
    "smollm3",
    (
        *USUAL,
        family.BIASES,
        family.FEED_FORWARD_BIAS,
        family.layered(_kinds, _attentions, _layers_config),
    ),
)
