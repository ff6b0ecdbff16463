"""The platforms that run a program, by jax's names of them."""

from __future__ import annotations

import re

import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.runtime.program.program_file import ProgramRecord

ALL = ("cpu", "cuda", "rocm", "tpu")
# What TensorFlow is asked to lower for. Calls of libraries are this platform's.
_LOWERED_FOR = "cpu"

_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")
# Calls that are part of every compiler of XLA.
_OF_ALL = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.FuncResultSharding"}


def calls_of_libraries(module: str) -> list[str]:
    """Returns the functions of platform libraries that a StableHLO module calls, sorted."""
    return sorted(set(_CALL.findall(module)) - _OF_ALL)


def platforms_of(module: str) -> tuple[str, ...]:
    """Returns the platforms that run a StableHLO module that was lowered from TensorFlow."""
    return (_LOWERED_FOR,) if calls_of_libraries(module) else ALL


def check_platform(path: str, record: ProgramRecord, device: jax.Device) -> None:
    """Raises ValueError naming the file if a device's platform does not run the program."""
    if record.platforms is msgspec.UNSET:
        return
    found = {"gpu": "cuda"}.get(device.platform, device.platform)
    if found == "cuda" and "rocm" in device.client.platform_version.lower():
        found = "rocm"
    if found not in record.platforms:
        raise UserError(
            f"{path} was exported for {' and '.join(record.platforms)}, but jax found {found} "
            f"({device.device_kind}) here; export it again without operations that only that "
            "platform has"
        )
