"""Compiling a program for a topology, without it: what it takes of memory, and its text."""

from __future__ import annotations

import dataclasses
import re
import time

import jax

from lingvo_gshard.planning import topologies
from lingvo_gshard.planning.topologies import Topology
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.runtime.executable import Executable
from lingvo_gshard.runtime.hlo import Rematerialisation
from lingvo_gshard.runtime.program import Program

# What compilers write while they compile for a machine that is not there is for nobody.
_EVERYTHING = ("",)
_NEEDED = re.compile(
    r"Used (?P<used>[\d.]+)(?P<used_unit>[KMGT]?)i?B? of"
    r"|temporaries \((?P<temporaries>[\d.]+)(?P<unit>[KMGT]?)\)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The chip of the most memory that libtpu compiles for; its devices are chips, in three dimensions.
_ROOMIEST = "v5p"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program of one device, compiled.

    memory: bytes as of runtime.program.memory_bytes. note: where another machine had to stand in.
    """

    text: str
    memory: dict[str, int]
    seconds: float
    made_whole: list[Rematerialisation]
    note: str = ""


def compile_for(program: Program, topology: Topology) -> Compiled:
    """Returns the program as the topology's compiler makes it.

    A program that does not fit the chip is compiled for one with more memory, so that there is
    something to say of it; its memory is then what the chip's own compiler said.

    Raises ValueError if the mesh does not fit the topology, if the compiler refuses the program,
    or if it fits no chip.
    """
    program.mesh.check_devices(topology.devices)
    started = time.monotonic()
    try:
        return _compile(program, topology, started)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
        raise ValueError(
            f"--topology={topology.name}: its compiler refuses {program.name}: {message}"
        )
    return _compile_roomily(program, topology, message, started)


def _compile(program: Program, topology: Topology, started: float) -> Compiled:
    with standard_error.kept(_EVERYTHING):
        executable = Executable(program, topology.compile_devices())
    seconds = time.monotonic() - started
    made_whole = executable.rematerialisations()
    return Compiled(executable.hlo(), executable.memory(), seconds, made_whole)


def _compile_roomily(
    program: Program, topology: Topology, message: str, started: float
) -> Compiled:
    larger = topologies.get(f"{_ROOMIEST}:{_shape_of(topology.devices)}")
    try:
        compiled = _compile(program, larger, started)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology={topology.name}: {program.name} needs far more memory than a device has: "
            f"{_first_line(message)} Not even {larger.chip.name} has as much: "
            f"{_first_line(str(error))} Take more devices, or a strategy that splits more."
        ) from None
    temporaries = _temporaries(message, compiled.memory)
    memory = {**compiled.memory, "temporaries": temporaries}
    memory["peak"] = sum(memory[name] for name in ("arguments", "outputs", "temporaries", "code"))
    note = (
        f"It does not fit: operations and times are of the program as compiled for "
        f"{larger.chip.name}, which has more memory; {topology.chip.name}'s compiler said: "
        f"{_first_line(message)}"
    )
    return dataclasses.replace(compiled, memory=memory, note=note)


def _temporaries(message: str, memory: dict[str, int]) -> int:
    """Bytes of temporaries that a compiler's refusal names, of the program or of those alone."""
    found = _NEEDED.search(message)
    if found is None:
        return memory["temporaries"]
    if found["temporaries"]:
        return int(float(found["temporaries"]) * _UNITS[found["unit"]])
    used = int(float(found["used"]) * _UNITS[found["used_unit"]])
    return used - memory["arguments"] - memory["outputs"] - memory["code"]


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0]


def _shape_of(devices: int) -> str:
    """Three dimensions of so many chips in all, as even as powers of two allow."""
    sizes = [1, 1, 1]
    for factor in _prime_factors(devices):
        sizes[sizes.index(min(sizes))] *= factor
    return "x".join(map(str, sorted(sizes)))


def _prime_factors(number: int) -> list[int]:
    """Largest first."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found[::-1]
