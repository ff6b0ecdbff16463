"""Flags that say how the tokens of translations and texts are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.decoding.precision import TRAINED
from lingvo_gshard.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.inference.published_settings import PublishedSettings

# The flags that are numbers.
_NUMBERS = tuple(
    f.name for f in dataclasses.fields(DecodingOptions) if isinstance(f.default, (int, float))
)
# The flags of `define_decoding_flags`: the fields of `DecodingOptions`, `best` excepted.
DECODING_FLAGS = tuple(f.name for f in dataclasses.fields(DecodingOptions) if f.name != "best")


def define_precision_flag(values: flags.FlagValues, default: str | None = TRAINED) -> None:
    """Defines --precision, which says how weights are stored and multiplied."""
    flags.DEFINE_string(
        "precision",
        default,
        "How the weights are stored and multiplied: trained, as in training; int8, with a quarter "
        "of the memory and faster products; int8_weights, stored as int8 and multiplied as in "
        "training, which is more exact and slower.",
        flag_values=values,
    )


def define_decoding_flags(values: flags.FlagValues, continues: bool = False) -> None:
    """Defines the flags of `DecodingOptions`, `best` excepted.

    Args:
      values: the command's flags.
      continues: whether the command continues texts, which draws tokens by default, or else
        translates, which searches for the best ones.
    """
    defaults = DRAWING if continues else DecodingOptions()
    flags.DEFINE_integer(
        "beam_size",
        defaults.beam_size,
        "Hypotheses kept for each text; 1 is greedy decoding, several times as fast. Drawing "
        "needs 1.",
        1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "length_exponent",
        1.0,
        "How much beam search favors longer texts; 0 disables it.",
        0.0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "coverage_weight",
        0.0,
        "How much beam search favors translations that attend to all of the source; 0 disables it.",
        0.0,
        flag_values=values,
    )
    usual = (
        "until its row is full, at least half a row"
        if continues
        else "twice those of the source and 10 more"
    )
    flags.DEFINE_integer(
        "most_tokens",
        0,
        f"Largest number of new tokens; 0: {usual}.",
        0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "least_tokens",
        0,
        "Smallest number of new tokens, the end counted.",
        0,
        flag_values=values,
    )
    _define_drawing_flags(values, defaults.temperature)
    _define_restricting_flags(values)


def decoding_options(
    values: flags.FlagValues, best: int = 1, published: PublishedSettings | None = None
) -> DecodingOptions:
    """Returns the options that the flags give.

    Args:
      values: the flags.
      best: texts to return for each one that is given.
      published: how the model was published to be decoded, where no flag says otherwise.

    Raises:
      UserError: options are wrong or do not go together.
    """
    fields = decoding_fields(values)
    if published is None or not published.fields:
        return DecodingOptions(**fields, best=best)
    given = {name: value for name, value in fields.items() if values[name].present}
    usual: dict[str, Any] = {
        name: values[name].default for name in DECODING_FLAGS if name in _NUMBERS
    }
    return published.options(DecodingOptions(**usual), {**given, "best": best})


def decoding_fields(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the fields of `DecodingOptions` that the flags give: all but `best`."""
    given: dict[str, Any] = {name: values[name].value for name in DECODING_FLAGS}
    given["stop"] = tuple(values.stop)
    for name in ("allowed_tokens", "forbidden_tokens"):
        given[name] = tuple(_id(name, text) for text in given[name])
    return given


def _define_restricting_flags(values: flags.FlagValues) -> None:
    """Defines the flags that restrict the tokens of a text and say where it stops."""
    for name, what in (
        ("allowed", "The only ids to choose from, besides the end"),
        ("forbidden", "Ids that are not chosen"),
    ):
        flags.DEFINE_list(f"{name}_tokens", [], f"{what}, separated by commas.", flag_values=values)
    flags.DEFINE_multi_string(
        "stop",
        [],
        "A text that ends a text, which then lacks it. May be repeated. Not for beam search.",
        flag_values=values,
    )


def _define_drawing_flags(values: flags.FlagValues, temperature: float) -> None:
    """Defines the flags that say how tokens are drawn.

    Args:
      values: the command's flags.
      temperature: the default.
    """
    flags.DEFINE_float(
        "temperature",
        temperature,
        "Divides the logits that tokens are drawn by: values below 1 favor likely tokens; 0 draws "
        "none and takes the likeliest.",
        0.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "top_k", 0, "Draws from this many likeliest tokens; 0: from all.", 0, flag_values=values
    )
    flags.DEFINE_float(
        "top_p",
        1.0,
        "Draws from the fewest tokens whose probabilities reach this sum; 1: from all.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "min_p",
        0.0,
        "Draws from tokens at least this much as likely as the likeliest one; 0: from all.",
        0.0,
        1.0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "repetition_penalty",
        1.0,
        "Values above 1 make tokens that occurred less likely. Needs a temperature.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Seed of the draws; another one gives other texts.",
        0,
        2**31 - 1,
        flag_values=values,
    )


def _id(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--{name}: {text!r} is no id; integers were expected") from None
