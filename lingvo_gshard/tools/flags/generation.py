"""Flags of plans of generation, and what they ask for."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.generation import GenerationOptions
from lingvo_gshard.tools.flags.options import define_option_flags, read_options

# The precision of the weights of a config that is planned to generate.
PRECISION = "bfloat16_weights"
_ONLY_HERE = ("batch", "largest_batch", "prompt", "every_layer")
_NOT_HERE = ("search", "tokens", "html", "calibration")


def define_generation_flags(values: flags.FlagValues) -> None:
    """Defines --generate and the flags that only apply to it."""
    flags.DEFINE_boolean(
        "generate",
        False,
        "Plans generation with a language model, not training: a step of decoding, and prefill.",
        flag_values=values,
    )
    note = "With --generate."
    names = ("batch", "prompt", "every_layer")
    define_option_flags(values, GenerationOptions(), notes=dict.fromkeys(names, note))
    flags.DEFINE_boolean(
        "largest_batch",
        False,
        "With --generate, searches the largest batch that fits in place of --batch.",
        flag_values=values,
    )


def check_generation_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if flags of generation and of other plans are mixed."""
    if not values.generate:
        for name in _ONLY_HERE:
            if values[name].present:
                raise UserError(
                    f"--{name}={values[name].value} applies to --generate, which is not given"
                )
        return
    if values.largest_batch and values["batch"].present:
        raise UserError(
            f"--batch={values.batch} and --largest_batch both say how many texts are decoded "
            "together; give one of them"
        )
    for name in _NOT_HERE:
        if values[name].present and values[name].value:
            raise UserError(
                f"--{name}={values[name].value} does not apply to --generate; give one of them"
            )


def generation_options(values: flags.FlagValues) -> GenerationOptions:
    """Returns the options that the flags give."""
    return read_options(values, GenerationOptions)
