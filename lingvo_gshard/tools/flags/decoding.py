"""The flag of the weights' precision in decoding."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.inference.decoding.precision import TRAINED


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
