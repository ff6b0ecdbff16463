"""Compiling a program for a topology, without it: what it takes of memory, and its text."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import jax

from lingvo_gshard.hlo.summary import Rematerialization
from lingvo_gshard.planning.machines import chips, topologies
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.progress import Progress, ignore_progress
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding.mesh import Mesh

# What compilers write while they compile for a machine that is not there is for nobody.
_EVERYTHING = ("",)
# Both forms of a TPU compiler's refusal name all of a program: what it is given, makes and keeps.
_NEEDED = re.compile(
    r"(?:Used |temporaries \()(?P<bytes>[\d.]+)(?P<unit>[KMGT]?)(?:\)| of)", re.IGNORECASE
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Chips of most memory that libtpu compiles for; the second's devices are two to a chip.
_ROOMIEST = ("v5p", "tpu7x")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program of one device, compiled.

    memory: bytes as of runtime.program.memory_bytes. refused: whether the chip's own compiler found
    that it does not fit, and another machine stood in. note: what there is to say of that.
    """

    text: str
    memory: dict[str, int]
    seconds: float
    made_whole: list[Rematerialization]
    refused: bool = False
    note: str = ""


def compile_for(
    program: Program, topology: Topology, progress: Progress = ignore_progress
) -> Compiled:
    """Returns the program as the topology's compiler makes it.

    A program that does not fit the chip is compiled for one with more memory, so that there is
    something to say of it; its memory is then what the chip's own compiler said.

    Raises ValueError if the mesh does not fit the topology, if the compiler refuses the program,
    or if it fits no chip.
    """
    check_mesh(program.mesh, topology)
    progress(f"compiling for {topology.name}")
    started = time.monotonic()
    try:
        return _compile(program, topology, started)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        raise ValueError(
            f"--topology={topology.name}: its compiler refuses {program.name}: {message}"
        )
    return _compile_roomily(program, topology, message, started, progress)


def _compile(program: Program, topology: Topology, started: float) -> Compiled:
    with standard_error.kept(_EVERYTHING):
        executable = Executable(program, topology.compile_devices())
    seconds = time.monotonic() - started
    made_whole = executable.rematerializations()
    return Compiled(executable.hlo(), executable.memory(), seconds, made_whole)


def check_mesh(mesh: Mesh, topology: Topology) -> None:
    """Raises ValueError naming --mesh and --topology if they have not as many devices."""
    if mesh.size != topology.devices:
        raise ValueError(
            f"--mesh={mesh} is of {mesh.size:,} devices, but --topology={topology.name} has "
            f"{topology.devices:,}; expected axes whose sizes multiply to that, such as "
            f"data={topology.devices}"
        )


def _compile_roomily(
    program: Program, topology: Topology, message: str, started: float, progress: Progress
) -> Compiled:
    larger = _roomier(topology)
    if larger is None:
        raise ValueError(_too_large(program, topology, message))
    progress(f"it does not fit: compiling for {larger.name}, which has more memory")
    try:
        compiled = _compile(program, larger, started)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{_too_large(program, topology, message)} Not even {larger.chip.name} has as much: "
            f"{_first_line(str(error))}"
        ) from None
    memory = dict(compiled.memory)
    memory["temporaries"] = _temporaries(message, memory)
    memory["peak"] = sum(memory[name] for name in ("arguments", "outputs", "temporaries", "code"))
    note = (
        f"It does not fit: operations and times are of the program as compiled for "
        f"{larger.chip.name}, which has more memory; {topology.chip.name}'s compiler said: "
        f"{_first_line(message)}"
    )
    return dataclasses.replace(compiled, memory=memory, refused=True, note=note)


def _too_large(program: Program, topology: Topology, message: str) -> str:
    return (
        f"--topology={topology.name}: {program.name} needs far more memory than a device has; "
        "take more devices, or a --strategy that splits more. Its compiler said: "
        f"{_first_line(message)}"
    )


def _temporaries(message: str, memory: dict[str, int]) -> int:
    """Bytes of temporaries by a compiler's refusal, which names the sum with what it is given."""
    found = _NEEDED.search(message)
    if found is None:
        return memory["temporaries"]
    whole = int(float(found["bytes"]) * _UNITS[found["unit"].upper()])
    return max(whole - memory["arguments"] - memory["outputs"], 0)


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0]


def _roomier(topology: Topology) -> Topology | None:
    """A slice of as many devices, of a chip with more memory, as even as there is one."""
    for key in _ROOMIEST:
        chip = chips.get(key)
        if chip.usable_bytes <= topology.chip.usable_bytes:
            continue
        count, apart = divmod(topology.devices, chip.partitions)
        for shape in [] if apart else _shapes(count):
            try:
                return topologies.get(f"{key}:{shape}")
            except ValueError:
                continue
    return None


def _shapes(count: int) -> list[str]:
    """Three sizes whose product is `count`, the most even first."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    shapes = [
        (a, b, count // (a * b))
        for a, b in itertools.product(divisors, divisors)
        if count % (a * b) == 0
    ]
    return ["x".join(map(str, shape)) for shape in sorted(shapes, key=lambda s: (max(s), s))]
