"""Rotary positions in configs: their base, and the scalings for longer texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lingvo_gshard.core import Params, UserError, names
from lingvo_gshard.layers import RotaryScaling
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.published_layers import rotary_scaling

_DEFAULT, _PROPORTIONAL = "default", "proportional"
# Published type of a scaling -> our class.
_SCALINGS: dict[str, type[RotaryScaling]] = {
    _DEFAULT: RotaryScaling,
    "linear": rotary_scaling.LinearScaling,
    "dynamic": rotary_scaling.DynamicNTKScaling,
    "llama3": rotary_scaling.Llama3Scaling,
    "yarn": rotary_scaling.YarnScaling,
    "longrope": rotary_scaling.LongRopeScaling,
    _PROPORTIONAL: rotary_scaling.ProportionalScaling,
}
# Types whose parameters name the length of texts in training, as transformers has them.
WITH_LENGTH = ("llama3", "longrope", "yarn")
# The parameters that a scaling must have.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
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
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "partial_rotary_factor": "share",
}
_MAGNITUDES = ("attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale")


def set_rope(config: PublishedConfig, attention: Params, rope: dict[str, Any]) -> None:
    """Sets the rotary hyperparameters of an attention.

    Args:
      config: the config, for messages and the number of positions.
      rope: what `PublishedConfig.rope` returned, or one of its entries by type of attention.

    Raises:
      UserError: a scaling, or a parameter of it, is unknown.
    """
    left = {key: value for key, value in rope.items() if value is not None}
    kind = left.pop("rope_type", _DEFAULT)
    # Positions of a text are the same in all sections of models that also see images.
    for name in ("type", "mrope_interleaved", "mrope_section"):
        left.pop(name, None)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        hint = names.nearest(str(kind), _SCALINGS)
        raise UserError(f"{config.where}: the rope_type {kind!r} is unknown. {hint}")
    _set_base(config, attention, kind, left)
    _complete(config, kind, left)
    scaling = _SCALINGS[kind].params()
    if kind == "yarn":
        scaling.magnitude = _yarn_magnitude(config, left)
    if kind == "longrope":
        scaling.set(**_long_magnitudes(config, left))
    for key, name in _KEYS.items():
        if key in left and name in scaling:
            value = left.pop(key)
            scaling.set(**{name: tuple(value) if isinstance(value, list) else value})
    # Some configs have parameters that their scaling does not read.
    for key in (*_KEYS, *_MAGNITUDES):
        left.pop(key, None)
    if left:
        raise UserError(
            f"{config.where}: the rotary parameters {', '.join(left)} are unknown for the "
            f"rope_type {kind!r}"
        )
    attention.rotary_scaling = scaling


def _set_base(config: PublishedConfig, attention: Params, kind: str, left: dict[str, Any]) -> None:
    """Takes the base, and the share of a head that rotates, out of rotary parameters.

    Classes that always rotate whole heads ignore the share unless a scaling reads it.
    """
    if "rope_theta" not in left:
        raise UserError(f"{config.where} lacks rope_theta, which this family needs")
    attention.rotary_base = float(left.pop("rope_theta"))
    name = "partial_rotary_factor"
    if kind == _PROPORTIONAL:
        attention.rotary_fraction = 1.0
        return
    fraction, has_share = float(left.pop(name, 1.0)), "rotary_fraction" in attention
    if not (has_share and config.counts(name)):
        if fraction != 1 and (kind != _DEFAULT or config.counts(name)):
            raise UserError(
                f"{config.where}: {name} is {fraction}, but this family rotates whole heads; "
                "remove it"
            )
        fraction = 1.0
    if has_share:
        whole = attention.head_dim
        attention.rotary_fraction = rotated_dimensions(config, whole, fraction) / whole


def rotated_dimensions(config: PublishedConfig, head_dim: int, fraction: float) -> int:
    """Returns how many dimensions of a head rotate.

    Args:
      config: the config, for messages.
      head_dim: dimensions of a head.
      fraction: the share of them that rotates.

    Raises:
      UserError: they are none, an odd number, or more than a head has.
    """
    rotated = int(head_dim * fraction)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise UserError(
            f"{config.where}: partial_rotary_factor={fraction} of head_dim={head_dim} is {rotated} "
            "dimensions; an even number was expected, 2 or more"
        )
    return rotated


def _complete(config: PublishedConfig, kind: str, left: dict[str, Any]) -> None:
    """Replaces rotary parameters that depend on other keys, as transformers does.

    Raises:
      UserError: the scaling lacks a parameter.
    """
    name, positions = "original_max_position_embeddings", config.get("max_position_embeddings")
    # Files may have it without a scaling that reads it.
    config.get(name, None)
    if kind in WITH_LENGTH:
        left[name] = family.original_length(config, left)
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


def ropes_by_type(
    config: PublishedConfig, bases: Mapping[str, float | None]
) -> dict[str, dict[str, Any]]:
    """Returns the rotary parameters of each type of attention.

    The `rope_scaling` of old files belongs to full attention.

    Args:
      bases: type -> the base where the parameters of the type name none.

    Raises:
      UserError: the file has rotary parameters of another type.
    """
    given = config.get("rope_parameters", None, dict) or {}
    others = given.keys() - bases.keys()
    if others:
        raise UserError(
            f"{config.where}: rope_parameters has {', '.join(sorted(others))}; only "
            f"{family.FULL!r} and {family.SLIDING!r} were expected, with the parameters of each"
        )
    ropes = {}
    for kind, base in bases.items():
        found = dict(given.get(kind) or {})
        if kind == family.FULL:
            found |= config.rope_entry("rope_scaling") or {}
        # transformers looks for it beside the types.
        found.pop("truncate", None)
        config.check_rope(found)
        ropes[kind] = {"rope_type": found.get("type", _DEFAULT), "rope_theta": base, **found}
    return ropes


def rotated_by_type(
    config: PublishedConfig, attention: Params, bases: Mapping[str, float | None]
) -> dict[str, Params]:
    """Returns `attentions_by_type` with the rotary parameters of each type; see `ropes_by_type`."""
    ropes, attentions = ropes_by_type(config, bases), family.attentions_by_type(config, attention)
    for kind, each in attentions.items():
        set_rope(config, each, ropes[kind])
    return attentions


def ropes_config(attentions: Iterable[Params], bases: Mapping[str, float]) -> dict[str, Any]:
    """Returns what `ropes_by_type` reads, from the Params of the attentions of all layers.

    Args:
      bases: type -> the base of a type that no layer has.
    """
    described = {
        family.SLIDING if each.window else family.FULL: rope_config(each) for each in attentions
    }
    ropes = {kind: config.pop("rope_parameters") for kind, config in described.items()}
    for kind, base in bases.items():
        ropes.setdefault(kind, {"rope_type": _DEFAULT, "rope_theta": base})
    return {**described.get(family.FULL, {}), "rope_parameters": ropes}


def rope_config(attention: Params) -> dict[str, Any]:
    """Returns the keys of a config that `set_rope` reads, from the Params of an attention."""
    scaling = attention.rotary_scaling
    kind = next(name for name, cls in _SCALINGS.items() if cls is scaling.cls)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": attention.rotary_base}
    values = {key: scaling.get(name) for key, name in _KEYS.items() if name in scaling}
    rope |= {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    if kind == "longrope":
        rope |= {"short_mscale": scaling.short_magnitude, "long_mscale": scaling.long_magnitude}
    if kind == "yarn":
        rope["attention_factor"] = scaling.magnitude or None
        rope |= _mscale_all_dim(attention, scaling.factor)
    # An attention without rotations has no parameter that says so.
    if "rotary_fraction" in attention and attention.rotary_fraction not in (0.0, 1.0):
        rope["partial_rotary_factor"] = attention.rotary_fraction
    config: dict[str, Any] = {"rope_parameters": {k: v for k, v in rope.items() if v is not None}}
    if kind == "dynamic":
        config["max_position_embeddings"] = scaling.original_length
    return config


def _read_rope(config: PublishedConfig, task: Params) -> None:
    set_rope(config, task.decoder.layer.self_attention, config.rope())


# The same rotary positions in all layers that have some.
ROPE = family.Part(_read_rope, lambda task: rope_config(family.rotating(task.decoder)))


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


def _long_magnitudes(config: PublishedConfig, rope: dict[str, Any]) -> dict[str, float]:
    """Takes the parameters of LongRoPE's magnitudes out of a config.

    Phi-3.5-MoE names both; other models have one, which depends on the factor of their length.

    Raises:
      UserError: the list of a factor is none.
    """
    for key in ("short_factor", "long_factor"):
        if not isinstance(rope[key], list) or not all(
            isinstance(value, (int, float)) for value in rope[key]
        ):
            raise UserError(f"{config.where}: {key} is {rope[key]!r}; a list of numbers was needed")
    original = rope["original_max_position_embeddings"]
    factor = rope.pop("factor", None) or config.get("max_position_embeddings") / original
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    one = float(rope.pop("attention_factor", None) or grown)
    return {
        "short_magnitude": float(rope.pop("short_mscale", None) or one),
        "long_magnitude": float(rope.pop("long_mscale", None) or one),
    }


def _mscale_all_dim(attention: Params, factor: float) -> dict[str, float]:
    """Returns DeepSeek's parameter that makes the softmax steeper, from the queries' factor."""
    if "plain_dim" not in attention or not attention.query_scale or factor <= 1:
        return {}
    steeper = attention.query_scale * (attention.plain_dim + attention.rotary_dim) ** 0.5
    return {"mscale_all_dim": round((math.sqrt(steeper) - 1) / (0.1 * math.log(factor)), 9)}


def mscale(factor: float, scale: float) -> float:
    """Returns YaRN's magnitude for a factor, with the weight that DeepSeek gives it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
