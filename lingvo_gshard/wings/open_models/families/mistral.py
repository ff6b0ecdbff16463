"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2), and later models.

Ministral 3 and Mistral Small 4 have YaRN and queries that grow after the positions of training.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.deepseek.deepseek_v3 import (
    PAIRS,
    latent_config,
    read_latent,
)
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS, scaled_experts
from lingvo_gshard.wings.open_models.families.rope import WITH_LENGTH, rope_config, set_rope
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter

_LENGTH, _GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"


def _take_growth(config: PublishedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Takes the growth of queries out of rotary parameters; returns hyperparameters.

    Raises:
      UserError: a parameter of the growth is missing or has a wrong value.
    """
    # The class writes this key and never reads it.
    rope.pop("max_position_embeddings", None)
    has_length = rope.get("rope_type") in WITH_LENGTH
    length = family.original_length(config, rope) if has_length else rope.get(_LENGTH)
    growth = rope.pop(_GROWTH, None)
    is_number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
    if not is_number or growth < 0 or not length:
        raise UserError(
            f"{config.where}: {_GROWTH} of the rotary parameters is {growth!r} and {_LENGTH} is "
            f"{length!r}; a number, 0 or more, and a number of positions were expected"
        )
    if not growth:
        return {}
    return dict(temperature_floor=length, temperature_offset=0, temperature_scale=float(growth))


def _growth_config(attention: Params, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with what `_take_growth` reads."""
    floor = attention.temperature_floor
    growth = attention.temperature_scale if floor else 0.0
    # Without growth, any length is one.
    rope = {_LENGTH: floor or 1, **values["rope_parameters"], _GROWTH: growth}
    return {**values, "rope_parameters": rope}


def _read_growing(config: PublishedConfig, task: Params) -> None:
    attention, rope = task.decoder.layer.self_attention, config.rope()
    attention.set(**_take_growth(config, rope))
    set_rope(config, attention, rope)


def _growing_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    return _growth_config(attention, rope_config(attention))


def _read_latent(config: PublishedConfig, task: Params) -> None:
    """Sets latent attention whose queries grow.

    Raises:
      UserError: the share of a head that rotates is not `qk_rope_head_dim`.
    """
    rope = config.rope()
    growth = _take_growth(config, rope)
    # The class has a default, which the sizes decide.
    rope.pop(_SHARE, None)
    share = (config.rope_entry("rope_parameters") or {}).get(_SHARE)
    plain, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if share is not None and int(share * (plain + rotated)) != rotated:
        raise UserError(
            f"{config.where}: {_SHARE} is {share}; {rotated / (plain + rotated)} was expected, as "
            f"qk_rope_head_dim={rotated} and qk_nope_head_dim={plain} say"
        )
    # The class rotates the share of this many dimensions.
    config.expect("head_dim", plain + rotated)
    read_latent(config, task, rope)
    task.decoder.layer.self_attention.set(**growth)


def _latent_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    heads = {"head_dim": attention.plain_dim + attention.rotary_dim}
    return _growth_config(attention, latent_config(task) | heads)


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    usual = family.SLIDING if config.get("sliding_window", None, int) is not None else family.FULL
    return family.types_of_layers(config, [usual] * config.get("num_hidden_layers"))


DENSE = decoder("mistral", (*USUAL, family.WINDOW))
# Ministral-8B-2410.
MINISTRAL = decoder("ministral", (*USUAL, family.layered(_kinds)))
MINISTRAL3 = decoder(
    "ministral3", (family.SILU, family.Part(_read_growing, _growing_config), family.WINDOW)
)
EXPERTS = decoder("mixtral", (*USUAL, family.WINDOW, LOCAL_EXPERTS, family.JITTER))
MISTRAL4 = decoder(
    "mistral4",
    (
        family.SILU,
        family.Part(_read_latent, _latent_config),
        scaled_experts(router=GroupLimitedRouter),
        PAIRS,
    ),
)
