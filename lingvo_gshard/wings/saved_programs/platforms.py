"""Finds the platforms that run a program."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import msgspec

from lingvo_gshard.core import Device, UserError, memory_kinds
from lingvo_gshard.runtime import Program, platform_of
from lingvo_gshard.sharding import HARDWARE, Partitioning
from lingvo_gshard.wings.saved_programs.program_file import ProgramRecord

ALL = ("cpu", "cuda", "rocm", "tpu")
# The platform that TensorFlow lowers for. Calls of its libraries are this platform's.
_LOWERED_FOR = "cpu"
# Kernels' bodies call functions whose names begin so, and run on this platform.
_CALLS_OF_KERNELS = (("tpu_custom_call", "tpu"), ("__gpu$", "cuda"), ("__cudnn$", "cuda"))

_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")
# Calls that are part of every compiler of XLA.
_OF_ALL = {
    memory_kinds.MOVE,
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "xla.sdy.FuncResultSharding",
}


def calls_of_libraries(module: str) -> list[str]:
    """Returns the functions of platform libraries that a StableHLO module calls, sorted."""
    return sorted(set(_CALL.findall(module)) - _OF_ALL)


def platforms_of(module: str) -> tuple[str, ...]:
    """Returns the platforms that run a StableHLO module that was lowered from TensorFlow."""
    calls = calls_of_libraries(module)
    if not calls:
        return ALL
    found = {_platform_of_call(call) for call in calls}
    # No platform has the functions of two.
    return tuple(found) if len(found) == 1 else ()


def _platform_of_call(call: str) -> str:
    found = (platform for begin, platform in _CALLS_OF_KERNELS if call.startswith(begin))
    return next(found, _LOWERED_FOR)


def check_platform(path: str, record: ProgramRecord, device: Device) -> None:
    """Raises ValueError naming the file if a device's platform does not run the program."""
    if record.platforms is msgspec.UNSET:
        return
    found, named = platform_of(device), " and ".join(record.platforms) or "no platform"
    if found not in record.platforms:
        raise UserError(
            f"{path} was exported for {named}, but jax found {found} "
            f"({device.device_kind}) here; export it again without operations that only that "
            "platform has"
        )


def with_bodies(
    portable: Program, make: Callable[[Partitioning], Program], partitioning: Partitioning
) -> Program:
    """Returns a program with a body for each platform whose kernels it can use.

    All other platforms run `portable`, which has this partitioning and no kernels.
    """
    bodies = []
    for platform in HARDWARE:
        program = make(partitioning.on(platform))
        if not program.kernels:
            # A function without a layer that could use kernels has none on any platform.
            break
        if any(not use.obstacle for use in program.kernels):
            bodies.append((platform, program.module))
    return dataclasses.replace(portable, bodies=tuple(bodies))
