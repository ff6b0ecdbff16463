"""Measures the speed of a saved training step, relative to matrix products on the same devices.

Needs neither TensorFlow nor a model, only JAX and this package:

    python -m lingvo_gshard.tools.benchmarks.exported train_step.zip

prints the JSON of `gshard-bench exported train_step.zip --json`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lingvo_gshard.core import SILENT, Device, Progress, UserError, explained, jax, jnp
from lingvo_gshard.runtime import Array, Program, memory_bytes, platform_of, using_partitioner
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.tools.benchmarks.timing import in_turns, pipelined_seconds
from lingvo_gshard.wings.saved_programs import program_file
from lingvo_gshard.wings.saved_programs.platforms import check_platform
from lingvo_gshard.wings.verification import synthetic

STEP, INITIAL = "train_step", "init_state"
# Synthetic weights have this standard deviation, so that activations stay finite.
_WEIGHT = 0.02

_DOT = re.compile(
    r"stablehlo\.dot(?:_general .*contracting_dims = \[([\d, ]*)\] x)?.*"
    r": \(tensor<([\w?]+)>, tensor<[\w?]+>\) -> tensor<([\w?]+)>"
)
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class SavedStep:
    """A step from a file, compiled with `options` of XLA, with a state and a batch."""

    def __init__(
        self,
        path: str,
        progress: Progress,
        initial: str | None = None,
        options: Mapping[str, str] | None = None,
    ):
        """Loads and compiles a step.

        `initial` is the file of an init_state program; None takes synthetic weights.

        Raises:
          UserError: names the file that is not such a program or needs other devices.
        """
        program = _load(path, STEP)
        if not program.work:
            raise UserError(
                f"{path} does not say its useful operations: it was written by an earlier "
                "version, or it is not a training step"
            )
        self.path, self.program, self.work = path, program, program.work
        self.devices = _devices(path, program.mesh)
        check_platform(path, program_file.read(path)[0], self.devices[0])
        self.options = dict(options or {})
        platform = platform_of(self.devices[0])
        self.gemm_dtype = product_dtype(program.exported(platform).mlir_module())
        progress.begin("compiling the step")
        started = time.perf_counter()
        self.compiled = _compile(program, self.devices, self.options)
        self.compile_seconds = time.perf_counter() - started
        progress.begin("making a state")
        mesh = jax.sharding.Mesh(program.mesh.arrange(self.devices), program.mesh.names)
        state = [array for array in program.inputs if not _is_batch(array)]
        batch = [array for array in program.inputs if _is_batch(array)]
        ranges = dict(program.work.vocabularies)
        with jax.enable_x64(True):
            if initial:
                self._state = _drawn(initial, path, program.mesh, state, self.devices)
            else:
                self._state = [_made_up(array, array.known_sharding(mesh)) for array in state]
            with explained(path, ValueError):
                values = [
                    synthetic.make_array(a.path, a.shape, a.dtype, ranges.get(a.path))
                    for a in batch
                ]
            self._batch = [a.put(value, mesh) for a, value in zip(batch, values, strict=True)]

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes of one device: state, batch, temporaries and code."""
        return memory_bytes(self.compiled)["peak"]

    @property
    def memory_in_use(self) -> int | None:
        """Returns the most bytes that were in use on a device; None if jax does not count them."""
        found = [device.memory_stats() or {} for device in self.devices]
        return max((each.get("peak_bytes_in_use", 0) for each in found), default=0) or None

    def recompile(self, options: Mapping[str, str]) -> None:
        """Compiles the step again with more options of XLA's compiler; the state stays."""
        self.compiled = _compile(self.program, self.devices, {**self.options, **options})

    def __call__(self) -> Callable[[], float]:
        """Starts a step and returns a function that waits for its loss."""
        *self._state, metrics = self.compiled(*self._state, *self._batch)
        metrics.copy_to_host_async()
        return lambda: float(np.asarray(metrics)[0])


def product_dtype(module: str) -> str:
    """Returns the dtype of most matrix products of a StableHLO module; a loop counts once."""
    operations: collections.Counter[str] = collections.Counter()
    for contracted, left, result in _DOT.findall(module):
        *sizes, element = left.split("x")
        if element in _DTYPES:
            places = [int(place) for place in contracted.split(",") if place.strip()] or [-1]
            depth = math.prod(int(sizes[place]) for place in places)
            operations[_DTYPES[element]] += depth * math.prod(map(int, result.split("x")[:-1]))
    return max(operations, key=operations.__getitem__, default="float32")


def _load(path: str, name: str) -> Program:
    program = Program.load(path)
    if program.name != name:
        raise UserError(
            f"{path} holds the program {program.name!r}, but {name!r} was expected; write it "
            f"with gshard-inspect --function={name} --program={path}"
        )
    return program


def _devices(path: str, mesh: Mesh) -> list[Device]:
    """Returns the devices of the mesh; JAX makes virtual CPU devices if it has only a CPU."""
    with contextlib.suppress(RuntimeError):
        if jax.config.values["jax_num_cpu_devices"] < mesh.size:
            jax.config.update("jax_num_cpu_devices", mesh.size)
    found = jax.devices()
    if len(found) < mesh.size:
        raise UserError(
            f"{path} is for --mesh={mesh}, {mesh.size} devices, but there are {len(found)} "
            f"({found[0].device_kind}); write it for as many, such as --mesh=data={len(found)}"
        )
    return found[: mesh.size]


def _compile(
    program: Program, devices: Sequence[Device], options: Mapping[str, str] | None = None
) -> jax.stages.Compiled:
    with using_partitioner(program.partitioner):
        return program.lower(devices).compile(dict(options) if options else None)


def _is_batch(array: Array) -> bool:
    return array.path.startswith("batch.")


def _drawn(
    path: str, step: str, mesh: Mesh, expected: Sequence[Array], devices: Sequence[Device]
) -> list[jax.Array]:
    """Returns the state from an init_state program; ValueError if it is not the step's state."""
    initial = _load(path, INITIAL)
    found = list(initial.outputs)
    if initial.mesh != mesh or found != expected:
        differ = [a.path for a, b in zip(found, expected, strict=False) if a != b]
        raise UserError(
            f"--init_state={path} draws another state than {step} takes: {len(found)} arrays on "
            f"{initial.mesh}, {len(expected)} on {mesh} expected"
            + (f"; the first that differs is {differ[0]}" if differ else "")
        )
    return list(_compile(initial, devices)())


def _made_up(array: Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """Returns a synthetic array: small random weights, scales of 1, all else 0."""
    path, dtype = array.path, jnp.dtype(array.dtype)
    shape = tuple(array.shape)
    value: float | None = 0.0
    if jnp.issubdtype(dtype, jnp.floating) and not path.startswith("moments."):
        if not shape or path.endswith("scale"):
            value = 1.0
        elif path.startswith("theta.") and len(shape) > 1:
            value = None
    return _maker(shape, dtype, sharding, value)(jax.random.key(len(path)))


@functools.cache
def _maker(
    shape: tuple, dtype: jnp.dtype, sharding: jax.sharding.NamedSharding, value: float | None
) -> Callable:
    """Returns a function that makes a sharded array of one value, or of small random values."""

    def make(key: jax.Array) -> jax.Array:
        if value is None:
            return jax.random.normal(key, shape, dtype) * jnp.asarray(_WEIGHT, dtype)
        return jnp.full(shape, value, dtype)

    return jax.jit(make, out_shardings=sharding)


REPEATS = 10
# Duration of a run of steps in seconds, and its maximum number of steps.
_RUN_SECONDS, _LONGEST_RUN = 0.5, 20
# The reference product grows until it takes this long: short products do not reach the full rate.
_PRODUCT_SECONDS, _SMALLEST_PRODUCT, _LARGEST_PRODUCT = 0.02, 2048, 8192


@dataclasses.dataclass
class ProgramTiming:
    """A measured step.

    Attributes:
      file: the saved program.
      step_seconds: time of a step, median of all runs.
      fastest_seconds: time of a step in the fastest run.
      slowest_seconds: time of a step in the slowest run.
      tokens: tokens of a batch.
      flops: useful floating-point operations of a step.
      gemm_dtype: element type of the reference product.
      gemm_size: rows and columns of its matrices.
      gemm_rate: its rate on all devices together, in FLOP/s.
      mfu: flops / step_seconds / gemm_rate.
      peak_bytes: peak bytes of one device, from the compiler.
      memory_in_use: the most bytes in use on a device after the first steps, as jax counts them.
        None if jax does not count bytes on this device.
    """

    file: str
    mesh: str
    devices: int
    step_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    tokens: int
    tokens_per_second: float
    flops: int
    gemm_dtype: str
    gemm_size: int
    gemm_rate: float
    mfu: float
    compile_seconds: float
    peak_bytes: int
    memory_in_use: int | None
    first_loss: float
    last_loss: float


class _NotFiniteError(ValueError):
    """The loss of a step is not finite."""


def measure(
    path: str, initial: str | None, repeats: int, gemm_size: int | None, progress: Progress
) -> ProgramTiming:
    """Measures a saved step; runs of steps alternate with runs of matrix products.

    Without `initial`, weights are synthetic. Without `gemm_size`, it is chosen for the device.

    Raises:
      UserError: names the file that cannot be run, or whose loss is not finite.
    """
    try:
        return measure_step(SavedStep(path, progress, initial), repeats, gemm_size, progress)
    except _NotFiniteError as error:
        hint = "" if initial else "; pass real weights with --init_state=FILE"
        raise UserError(f"{error}{hint}") from None


def measure_step(
    step: SavedStep, repeats: int, gemm_size: int | None, progress: Progress
) -> ProgramTiming:
    """Measures a step as `measure` does. Refuses a loss that is not finite."""
    losses = [step()() for _ in range(3)]
    # Before the matrices of products take memory.
    memory_in_use = step.memory_in_use
    progress.begin("sizing the product")
    gemm_size = gemm_size or _large_enough(step.devices, step.gemm_dtype)
    product = products(step.devices, step.gemm_dtype, gemm_size)
    once = pipelined_seconds(step, 1)
    run = max(1, min(_LONGEST_RUN, round(_RUN_SECONDS / once)))
    # Runs of both take about as long.
    count = max(1, round(once * run / pipelined_seconds(product, 1)))
    step_seconds, product_seconds = in_turns(
        [lambda: pipelined_seconds(step, run), lambda: pipelined_seconds(product, count)],
        repeats,
        progress,
    )
    losses.append(step()())
    if not all(map(math.isfinite, losses)):
        raise _NotFiniteError(f"{step.path}: the loss is {losses[0]} and then {losses[-1]}")
    taken, devices = float(np.median(step_seconds)), len(step.devices)
    rate = devices * 2 * gemm_size**3 / float(np.median(product_seconds))
    return ProgramTiming(
        file=step.path,
        mesh=str(step.program.mesh),
        devices=devices,
        step_seconds=taken,
        fastest_seconds=float(step_seconds.min()),
        slowest_seconds=float(step_seconds.max()),
        tokens=step.work.tokens,
        tokens_per_second=step.work.tokens / taken,
        flops=step.work.flops,
        gemm_dtype=step.gemm_dtype,
        gemm_size=gemm_size,
        gemm_rate=rate,
        mfu=step.work.flops / taken / rate,
        compile_seconds=step.compile_seconds,
        peak_bytes=step.peak_bytes,
        memory_in_use=memory_in_use,
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def products(devices: Sequence[Device], dtype: str, size: int) -> Callable:
    """Returns a function that starts a product on each device and returns a function to wait."""
    draw = jax.jit(lambda key: (jax.random.normal(key, (size, size)) * size**-0.5).astype(dtype))
    matrices = [jax.device_put(draw(jax.random.key(1)), device) for device in devices]
    multiply = jax.jit(jnp.matmul)

    def start() -> Callable[[], None]:
        results = [multiply(matrix, matrix) for matrix in matrices]
        return lambda: jax.block_until_ready(results)

    start()()
    return start


def device() -> str:
    """Returns JAX's name of the device."""
    return jax.devices()[0].device_kind


def _large_enough(devices: Sequence[Device], dtype: str) -> int:
    size = _SMALLEST_PRODUCT
    while size < _LARGEST_PRODUCT and pipelined_seconds(products(devices, dtype, size), 1) < (
        _PRODUCT_SECONDS
    ):
        size *= 2
    return size


def main() -> None:
    """Prints the result for one file as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="a training step, saved by gshard-inspect --program")
    parser.add_argument("--init_state", help="its init_state program; else weights are made up")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how many runs are timed")
    parser.add_argument("--gemm_size", type=int, help="rows and columns of the product's matrices")
    given = parser.parse_args()
    row = measure(given.file, given.init_state, given.repeats, given.gemm_size, SILENT)
    print(json.dumps({"device": device(), "rows": [dataclasses.asdict(row)]}))


if __name__ == "__main__":
    main()
