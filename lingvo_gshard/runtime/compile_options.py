"""Options of XLA's compilers for steps of training and evaluation.

Features bring options that are on by default, and `compile_options` changes them. An option that
the environment sets, in XLA_FLAGS or LIBTPU_INIT_ARGS, keeps the environment's value.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core import Device, Options, Seam, UserError, option
from lingvo_gshard.runtime.devices import platform_of

if TYPE_CHECKING:
    from lingvo_gshard.runtime.program.program import Program

# The value of `compile_options` that leaves out the table's options.
NONE = "none"
# XLA's call that exchanges ragged rows.
RAGGED_EXCHANGE = "ragged_all_to_all"
# Environment variables with options of the compilers.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SET = re.compile(r"--(\w+)")
_GIVEN = re.compile(r"(?P<name>\w+)=(?P<value>.*)")
# Errors of compilers about an unknown option or a wrong value.
_REFUSALS = re.compile(r"No such compile option|While setting option|Failed to parse")
# With these options libtpu 0.0.42.1 fails a check of its own on some programs, such as the training
# of OLMoE with fsdp over four v5p.
_FAILED_CHECK = "RET_CHECK failure"
_FRAGILE = (
    "xla_enable_async_reduce_scatter_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
)
# XLA reads options of GPUs in Python's spelling; libtpu reads both.
_SPELLINGS = {"true": "True", "false": "False"}


@dataclasses.dataclass(frozen=True)
class CompileOptions(Options):
    """Options of XLA's compiler for steps of training and evaluation."""

    compile_options: tuple[str, ...] = option(
        (),
        "Option of XLA's compiler for steps of training and evaluation, as name=value; name= "
        f"leaves one out, and {NONE} leaves out all that gshard-inspect --compiler lists. May be "
        "repeated. Default: sharding.compile_options.",
    )


@dataclasses.dataclass(frozen=True)
class Traits:
    """Describes a step for the choice of its options; see `step_compiler.traits_of`.

    Attributes:
      precision: `step.precision` of the run.
      in_parts: whether the step has several micro-batches, and gathers no weights in them.
      gathers_ahead: whether loops gather the weights of a layer while they compute another one.
      is_ragged: whether devices exchange different numbers of rows by XLA's ragged collective.
    """

    precision: str = ""
    in_parts: bool = False
    gathers_ahead: bool = False
    is_ragged: bool = False


_PLAIN = Traits()
# A feature returns the options, by name, that steps for a device are compiled with by default. It
# takes jax's names of the platform and of the device, and the step's traits.
COMPILER_OPTIONS: Seam[Callable[[str, str, Traits], dict[str, str]]] = Seam("compiler_options")


def chosen(
    platform: str,
    device_kind: str,
    given: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    traits: Traits = _PLAIN,
) -> dict[str, str]:
    """Returns the options that steps are compiled with, by name.

    Args:
      platform: jax's name of the devices' platform, such as "tpu", "cuda" or "cpu".
      device_kind: jax's name of the devices, such as "TPU v5 lite".
      given: `CompileOptions.compile_options`.

    Raises:
      UserError: one of `given` is neither name=value nor "none"; names compile_options.
    """
    texts = " ".join(environment.get(name, "") for name in _VARIABLES)
    kept = set(_SET.findall(texts))
    found: dict[str, str] = {}
    if NONE not in given:
        for defaults in COMPILER_OPTIONS:
            options = defaults(platform, device_kind, traits)
            found |= {name: value for name, value in options.items() if name not in kept}
    for text in given:
        if text == NONE:
            continue
        match = _GIVEN.fullmatch(text)
        if match is None:
            raise UserError(
                f"`compile_options={text}`: expected {NONE}, or name=value such as "
                "xla_enable_async_all_gather=True"
            )
        found[match["name"]] = _SPELLINGS.get(match["value"], match["value"])
    return {name: value for name, value in found.items() if value}


def chosen_for(
    device: Device,
    given: Sequence[str] = (),
    traits: Traits = _PLAIN,
    program: Program | None = None,
) -> dict[str, str]:
    """Returns the options that steps for devices of this kind are compiled with, by name.

    Args:
      device: one of the devices, which need not be in this machine.
      given: `CompileOptions.compile_options`.
      traits: the step's, which the program may complete.
      program: the step; None before it is lowered.

    Raises:
      UserError: one of `given` is neither name=value nor "none"; names compile_options.
    """
    platform = platform_of(device)
    if program is not None and program.calls(RAGGED_EXCHANGE, platform):
        traits = dataclasses.replace(traits, is_ragged=True)
    return chosen(platform, device.device_kind, given, traits=traits)


def options_in_words(options: Mapping[str, str]) -> str:
    """Returns options as one text, such as "xla_a=True, xla_b=1"."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def after_failure(message: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the options to compile with next, after a compiler failed a check of its own.

    Returns:
      None if no other options are known to help.
    """
    if _FAILED_CHECK not in message or not any(name in options for name in _FRAGILE):
        return None
    return {name: value for name, value in options.items() if name not in _FRAGILE}


def check_refusal(message: str, options: Mapping[str, Any]) -> None:
    """Raises UserError if a compiler's error is about one of the options."""
    if not _REFUSALS.search(message):
        return
    for name, value in options.items():
        if re.search(rf"\b{name}\b", message):
            raise UserError(
                f"`compile_options={name}={value}`: the installed compiler refuses it: "
                f"{message.strip().splitlines()[0]}. `compile_options={name}=` leaves it out"
            )
