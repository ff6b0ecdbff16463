"""Compiles programs for a topology that this machine does not have."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping

import msgspec

from lingvo_gshard.core import SILENT, Progress, UserError, jax
from lingvo_gshard.runtime import Executable, Program, compile_options, standard_error
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.planning.compiling.cache import OptimizedHlo, current_settings
from lingvo_gshard.wings.planning.compiling.compiler_process import EFFORT, CompilerProcess
from lingvo_gshard.wings.planning.machines import chips, compilers, topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.services.run_records import installed_versions

_FEWER_OPTIONS = (
    "libtpu failed a check of its own with asynchronous reduce-scatters: this step is compiled "
    "without them, here and in a training"
)
# Raise this number when the content of the cache's files changes its meaning.
_FORMAT = 1
_PACKAGES = ("jax", "jaxlib")


def key_of(
    program: Program,
    topology: Topology,
    generates_code: bool,
    options: Mapping[str, str] | None = None,
) -> str:
    """Returns the key of a compilation, 64 hexadecimal digits. A topology's name says its shape."""
    packages = (*_PACKAGES, *filter(None, [compilers.PACKAGES.get(topology.compiler)]))
    content = msgspec.json.encode(
        {
            "format": _FORMAT,
            "program": program.digest,
            "topology": topology.name,
            "compiler": topology.compiler,
            "options": {**topology.compiler_options, **(options or {})},
            "versions": installed_versions(packages),
            "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", compilers.OPTIONS)],
            "effort": [getattr(jax.config, name) for name in EFFORT],
            "usable_bytes": topology.chip.usable_bytes,
            "generates_code": generates_code,
        },
        order="deterministic",
    )
    return hashlib.sha256(content).hexdigest()


# Every line contains this text: all compiler output is hidden.
_EVERYTHING = ("",)
# TPU compilers refuse a program in two forms. Both state the sum of arguments, outputs and
# temporaries.
_NEEDED = re.compile(
    r"(?:Used |temporaries \()(?P<bytes>[\d.]+)(?P<unit>[KMGT]?)(?:\)| of)", re.IGNORECASE
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The chips with the most memory that libtpu compiles for. The second has two devices per chip.
_LARGEST_CHIPS = ("v5p", "tpu7x")
# A user who waits longer for a substitute for the chip's compiler is told what would help.
_PATIENCE_SECONDS = 10.0


class TooLargeError(UserError):
    """A program needs far more memory than a device has: `needed` bytes, if they are stated."""

    needed: int | None = None


def compile_for(
    program: Program,
    topology: Topology,
    progress: Progress = SILENT,
    options: Mapping[str, str] | None = None,
) -> OptimizedHlo:
    """Compiles a program with the topology's compiler.

    A program that does not fit the chip's memory is compiled for a chip with more memory, so that
    it can be planned all the same. The memory in the result is still what the chip's own compiler
    states.

    Raises:
      UserError: if the mesh and the topology differ in the number of devices, if the compiler
        rejects the program, or if the program fits no chip.
    """
    check_mesh(program.mesh, topology)
    chosen = current_settings()
    key = key_of(program, topology, chosen.generates_code, options)
    found = chosen.cache.get(key) if chosen.cache else None
    if found is not None:
        progress.begin("found the compiled program in the cache")
        return found
    started = time.monotonic()
    compiled = _compile_anew(program, topology, progress, options)
    compiled = msgspec.structs.replace(compiled, seconds=time.monotonic() - started)
    if chosen.cache:
        chosen.cache.put(key, compiled)
    return compiled


def _compile_anew(
    program: Program, topology: Topology, progress: Progress, options: Mapping[str, str] | None
) -> OptimizedHlo:
    """Compiles a program that is not in the cache."""
    progress.begin(f"compiling for {topology.name}")
    try:
        return _compile(program, topology, progress, options)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        raise UserError(
            f"`topology={topology.name}`: its compiler rejects {program.name}: {message}"
        )
    return _compile_for_larger(program, topology, message, progress, options)


def _compile(
    program: Program, topology: Topology, progress: Progress, options: Mapping[str, str] | None
) -> OptimizedHlo:
    """Compiles a program, with fewer options where those given are known to fail."""
    given = dict(options or {})
    try:
        return _compile_with(given, program, topology, progress)
    except jax.errors.JaxRuntimeError as error:
        compile_options.check_refusal(str(error), given)
        fewer = compile_options.after_failure(str(error), given)
        if fewer is None:
            raise
    return _noted(_compile(program, topology, progress, fewer), _FEWER_OPTIONS)


def _noted(compiled: OptimizedHlo, note: str) -> OptimizedHlo:
    return msgspec.structs.replace(compiled, note=". ".join(filter(None, (note, compiled.note))))


def _compile_with(
    options: dict[str, str], program: Program, topology: Topology, progress: Progress
) -> OptimizedHlo:
    """Compiles a program with these options, added to the topology's own."""
    options = {**topology.compiler_options, **options}
    if topology.compiler == topology.kind != "cpu":
        on_code = functools.partial(progress.begin, "generating code")
        with CompilerProcess(topology) as process:
            return process.compile(program, current_settings().generates_code, on_code, options)
    with _explaining_waits(topology, progress), standard_error.capture(_EVERYTHING):
        executable = Executable(program, topology.compile_devices(), options, is_called=False)
    return OptimizedHlo(
        proto=executable.hlo_proto(),
        memory=executable.memory(),
        # `compile_for` measures it.
        seconds=0.0,
        full_replications=executable.full_replications(),
    )


@contextlib.contextmanager
def _explaining_waits(topology: Topology, progress: Progress) -> Iterator[None]:
    """Says after a while that the chip's own compiler, which is not installed, would be faster."""
    if topology.compiler == topology.kind:
        yield
        return
    timer = threading.Timer(_PATIENCE_SECONDS, progress.begin, [compilers.waiting(topology.chip)])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_mesh(mesh: Mesh, topology: Topology) -> None:
    """Checks that a mesh fits a topology: its number of devices, and its axes over slices.

    Raises:
      UserError: if the numbers of devices differ, slices do not divide the leading axes, or the
        mesh has its own device order over several slices; names `mesh` and `topology`.
    """
    if mesh.size != topology.devices:
        raise UserError(
            f"`mesh={mesh}` has {mesh.size:,} devices, but `topology={topology.name}` has "
            f"{topology.devices:,}; expected axes whose sizes multiply to that, such as "
            f"data={topology.devices}"
        )
    if topology.slices > 1 and mesh.device_order != "contiguous":
        raise UserError(
            f"`device_order={mesh.device_order}`: `topology={topology.name}` has "
            f"{topology.slices} slices, whose devices keep their order; expected contiguous"
        )
    mesh.across_slices(topology.slices)


def _compile_for_larger(
    program: Program,
    topology: Topology,
    message: str,
    progress: Progress,
    options: Mapping[str, str] | None,
) -> OptimizedHlo:
    """Compiles a program for a chip with more memory; `message` is the first compiler's refusal."""
    larger = _larger_topology(topology)
    if larger is None:
        raise _too_large(program, topology, message)
    progress.begin(f"the program does not fit: compiling for {larger.name}, which has more memory")
    try:
        compiled = _compile(program, larger, progress, options)
    except jax.errors.JaxRuntimeError as error:
        why = f" Not even {larger.chip.name} has enough: {_first_line(str(error))}"
        raise _too_large(program, topology, message, why) from None
    memory = dict(compiled.memory)
    total = _needed(message)
    if total is not None:
        memory["temporaries"] = max(total - memory["arguments"] - memory["outputs"], 0)
    memory["peak"] = sum(memory[name] for name in ("arguments", "outputs", "temporaries", "code"))
    note = (
        f"The step does not fit. Its operations and times are those of the program compiled for "
        f"{larger.chip.name}, which has more memory. The compiler for {topology.chip.name} "
        f"reported: {_first_line(message)}"
    )
    return _noted(msgspec.structs.replace(compiled, memory=memory, refused=True), note)


def _too_large(program: Program, topology: Topology, message: str, why: str = "") -> TooLargeError:
    """Returns the error of a program that no chip has memory for."""
    error = TooLargeError(
        f"`topology={topology.name}`: {program.name} needs far more memory than a device has. The "
        f"compiler reported: {_first_line(message)}{why}"
    )
    error.needed = _needed(message)
    return error


def _needed(message: str) -> int | None:
    """The bytes of arguments, outputs and temporaries according to a compiler's refusal."""
    found = _NEEDED.search(message)
    return found and int(float(found["bytes"]) * _UNITS[found["unit"].upper()])


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0]


def _larger_topology(topology: Topology) -> Topology | None:
    """Slices with as many devices and more memory, as close to a cube as possible."""
    for key in _LARGEST_CHIPS:
        chip = chips.get(key)
        if chip.usable_bytes <= topology.chip.usable_bytes:
            continue
        count, remainder = divmod(topology.devices // topology.slices, chip.partitions)
        for shape in [] if remainder else _shapes(count):
            try:
                return topologies.get(f"{key}:{shape}*{topology.slices}")
            except ValueError:
                continue
    return None


def _shapes(count: int) -> list[str]:
    """All shapes of `count` chips in three dimensions, the most even first."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    shapes = [
        (a, b, count // (a * b))
        for a, b in itertools.product(divisors, divisors)
        if count % (a * b) == 0
    ]
    return ["x".join(map(str, shape)) for shape in sorted(shapes, key=lambda s: (max(s), s))]
