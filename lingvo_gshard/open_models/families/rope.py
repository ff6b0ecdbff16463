"""Rotary positions in configs: their base, and the scalings for longer texts."""

from __future__ import annotations

import math
from typing import Any

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.attention.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.family import original_length

_DEFAULT = "default"
# Published type of a scaling -> our class.
_SCALINGS: dict[str, type[RotaryScaling]] = {
    _DEFAULT: RotaryScaling,
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
# The parameters that a scaling must have.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Published key -> our hyperparameter.
_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}


def set_rope(config: PublishedConfig, attention: Params, rope: dict[str, Any]) -> None:
    """Sets the rotary hyperparameters of an attention.

    Args:
      config: the config, for messages and the number of positions.
      attention: Params of the attention.
      rope: what `PublishedConfig.rope` returned, or one of its entries by type of attention.

    Raises:
      UserError: a scaling, or a parameter of it, is unknown.
    """
    left = {key: value for key, value in rope.items() if value is not None}
    kind = left.pop("rope_type", _DEFAULT)
    left.pop("type", None)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        hint = names.nearest(str(kind), _SCALINGS)
        raise UserError(f"{config.where}: the rope_type {kind!r} is unknown. {hint}")
    _set_base(config, attention, left)
    _complete(config, kind, left)
    scaling = _SCALINGS[kind].params()
    if kind == "yarn":
        scaling.magnitude = _yarn_magnitude(config, left)
    for key, name in _KEYS.items():
        if key in left and name in scaling:
            scaling.set(**{name: left.pop(key)})
    # Some configs have this key although their scaling does not read it.
    left.pop("original_max_position_embeddings", None)
    if left:
        raise UserError(
            f"{config.where}: the rotary parameters {', '.join(left)} are unknown for the "
            f"rope_type {kind!r}"
        )
    attention.rotary_scaling = scaling


def _set_base(config: PublishedConfig, attention: Params, left: dict[str, Any]) -> None:
    """Takes the base, and the share of a head that rotates, out of rotary parameters."""
    if "rope_theta" not in left:
        raise UserError(f"{config.where} lacks rope_theta, which this family needs")
    attention.rotary_base = float(left.pop("rope_theta"))
    fraction = float(left.pop("partial_rotary_factor", 1.0))
    if "rotary_fraction" in attention:
        attention.rotary_fraction = fraction
    elif fraction != 1:
        raise UserError(
            f"{config.where}: partial_rotary_factor is {fraction}, but this family rotates "
            "qk_rope_head_dim dimensions; remove it"
        )


def _complete(config: PublishedConfig, kind: str, left: dict[str, Any]) -> None:
    """Replaces rotary parameters that depend on other keys, as transformers does.

    Raises:
      UserError: the scaling lacks a parameter.
    """
    name, positions = "original_max_position_embeddings", config.get("max_position_embeddings")
    if kind in ("llama3", "yarn"):
        left[name] = original_length(config, left)
    elif kind == "dynamic":
        # transformers reads no other length here, whatever the parameter says.
        left[name] = positions
    if kind == "yarn" and "factor" not in left:
        left["factor"] = positions / left[name]
    for key in _REQUIRED.get(kind, ()):
        if key not in left:
            raise UserError(f"{config.where}: the rope_type {kind!r} needs {key}")
    for key in ("beta_fast", "beta_slow"):
        if not left.get(key, True):
            # transformers takes 0 for a parameter that is not given.
            del left[key]


def rope_config(attention: Params) -> dict[str, Any]:
    """Returns the keys of a config that `set_rope` reads, from the Params of an attention."""
    scaling = attention.rotary_scaling
    kind = next(name for name, cls in _SCALINGS.items() if cls is scaling.cls)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": attention.rotary_base}
    rope |= {key: scaling.get(name) for key, name in _KEYS.items() if name in scaling}
    if kind == "yarn":
        rope["attention_factor"] = scaling.magnitude or None
        rope |= _mscale_all_dim(attention, scaling.factor)
    if "rotary_fraction" in attention and attention.rotary_fraction != 1.0:
        rope["partial_rotary_factor"] = attention.rotary_fraction
    config: dict[str, Any] = {"rope_parameters": {k: v for k, v in rope.items() if v is not None}}
    if kind == "dynamic":
        config["max_position_embeddings"] = scaling.original_length
    return config


def _yarn_magnitude(config: PublishedConfig, rope: dict[str, Any]) -> float:
    """Takes the parameters of YaRN's magnitude out of a config; 0 for the paper's.

    Raises:
      UserError: the magnitude is not above 0.
    """
    given = rope.pop("attention_factor", None)
    one, all_ = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    if given is not None and given <= 0:
        raise UserError(
            f"{config.where}: attention_factor is {given}; a number above 0 was expected"
        )
    if given is not None:
        return float(given)
    if one and all_:
        return mscale(rope["factor"], one) / mscale(rope["factor"], all_)
    return 0.0


def _mscale_all_dim(attention: Params, factor: float) -> dict[str, float]:
    """Returns DeepSeek's parameter that makes the softmax steeper, from the queries' factor."""
    if "plain_dim" not in attention or not attention.query_scale or factor <= 1:
        return {}
    steeper = attention.query_scale * (attention.plain_dim + attention.rotary_dim) ** 0.5
    return {"mscale_all_dim": round((math.sqrt(steeper) - 1) / (0.1 * math.log(factor)), 9)}


def mscale(factor: float, scale: float) -> float:
    """Returns YaRN's magnitude for a factor, with the weight that DeepSeek gives it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
