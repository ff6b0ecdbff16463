"""Flags that say how the tokens of translations and texts are chosen."""

from __future__ import annotations

import dataclasses

from absl import flags

from lingvo_gshard.api.options import SamplingOptions
from lingvo_gshard.inference.options import DecodingOptions


def define_decoding_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `DecodingOptions`."""
    flags.DEFINE_integer(
        "beam_size",
        4,
        "Hypotheses kept for each sentence; 1 is greedy decoding, several times as fast.",
        1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "length_exponent",
        1.0,
        "How much beam search favors longer translations; 0 disables it.",
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


def decoding_options(values: flags.FlagValues, best: int = 1) -> DecodingOptions:
    """Returns the options that the flags give.

    Args:
      values: the flags.
      best: translations of each sentence.
    """
    return DecodingOptions(
        beam_size=values.beam_size,
        length_exponent=values.length_exponent,
        coverage_weight=values.coverage_weight,
        best=best,
    )


def define_sampling_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `SamplingOptions`."""
    flags.DEFINE_integer("samples", 1, "Texts per beginning.", 1, flag_values=values)
    flags.DEFINE_integer(
        "most_tokens",
        0,
        "Largest number of new tokens per text; 0: until its row is full, at least half a row.",
        0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Divides the logits: values below 1 favor likely tokens; 0 takes the likeliest.",
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
        "Values above 1 make tokens that occurred less likely.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "stop",
        [],
        "A text that ends a text, which then lacks it. May be repeated.",
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


def sampling_options(values: flags.FlagValues) -> SamplingOptions:
    """Returns the options of sampling that the flags give."""
    names = (field.name for field in dataclasses.fields(SamplingOptions))
    given = {name: values[name].value for name in names}
    return SamplingOptions(**given | {"stop": tuple(values.stop)})
