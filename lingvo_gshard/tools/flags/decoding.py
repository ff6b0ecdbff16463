"""Flags that say how translations are decoded."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api.options import DecodingOptions


def define_decoding_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `DecodingOptions`."""
    flags.DEFINE_integer(
        "beam_size",
        4,
        "Hypotheses kept for each sentence; 1 is greedy decoding, about four times as fast.",
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


def decoding_options(values: flags.FlagValues) -> DecodingOptions:
    """Returns the options that the flags give."""
    return DecodingOptions(values.beam_size, values.length_exponent)
