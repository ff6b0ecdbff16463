"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2), and Ministral 3."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import JITTER, SILU, WINDOW, Part
from lingvo_gshard.wings.open_models.families.rope import rope_config, set_rope

_LENGTH, _GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"


def _read_warm_rope(config: PublishedConfig, task: Params) -> None:
    """Sets rotations, and how queries grow after the positions of training.

    Raises:
      UserError: a parameter of the growth is missing or has a wrong value.
    """
    attention, rope = task.decoder.layer.self_attention, config.rope()
    # The class writes it beside its default parameters and does not read it.
    rope.pop("max_position_embeddings", None)
    length, growth = rope.get(_LENGTH), rope.pop(_GROWTH, None)
    is_number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
    if not is_number or growth < 0 or not length:
        raise UserError(
            f"{config.where}: {_GROWTH} of the rotary parameters is {growth!r} and {_LENGTH} is "
            f"{length!r}; a number, 0 or more, and a number of positions were expected"
        )
    set_rope(config, attention, rope)
    if growth:
        attention.set(
            temperature_floor=length, temperature_offset=0, temperature_scale=float(growth)
        )


def _warm_rope_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    values = rope_config(attention)
    is_warm = attention.temperature_floor > 0
    rope = {
        # Without growth, any length is one.
        _LENGTH: attention.temperature_floor or 1,
        **values["rope_parameters"],
        _GROWTH: attention.temperature_scale if is_warm else 0.0,
    }
    return {**values, "rope_parameters": rope}


DENSE = decoder("mistral", (*USUAL, WINDOW))
MINISTRAL3 = decoder("ministral3", (SILU, Part(_read_warm_rope, _warm_rope_config), WINDOW))
EXPERTS = decoder("mixtral", (*USUAL, WINDOW, LOCAL_EXPERTS, JITTER))
