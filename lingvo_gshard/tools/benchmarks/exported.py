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
from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device, jax, jax_export, jnp
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.runtime.program import program_file
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import check_platform, using_partitioner
from lingvo_gshard.runtime.program.program_file import ProgramRecord
from lingvo_gshard.tools.benchmarks.timing import pipelined_seconds
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
    """A compiled training step from a file, with a state and a batch."""

    def __init__(
        self,
        path: str,
        progress: Progress,
        initial: str | None = None,
        options: Mapping[str, str] | None = None,
    ):
        """Loads and compiles a step.

        Args:
          path: file of the training step.
          progress: is told each stage as it begins.
          initial: file of an init_state program; None for synthetic weights.
          options: options of XLA's compiler.

        Raises:
          UserError: names the file that is not such a program or needs other devices.
        """
        record, exported = _load(path, STEP)
        if not record.work:
            raise UserError(
                f"{path} does not say its useful operations: it was written by an earlier "
                "version, or it is not a training step"
            )
        self.path, self.record, self.work = path, record, record.work
        check_platform(path, record, jax.devices()[0])
        self.devices, self._exported = _devices(path, record), exported
        self._options = dict(options or {})
        self.gemm_dtype = product_dtype(exported.mlir_module())
        progress.begin("compiling the step")
        started = time.perf_counter()
        self.compiled = _compile(record, exported, self.devices, self._options)
        self.compile_seconds = time.perf_counter() - started
        progress.begin("making a state")
        shardings = _shardings(record, record.inputs, self.devices)
        pairs = list(zip(record.inputs, shardings, strict=True))
        with jax.enable_x64(True):
            if initial:
                self._state = _drawn(initial, path, record, self.devices)
            else:
                self._state = [_made_up(*pair) for pair in pairs if not _is_batch(pair[0])]
            batch = [(array, sharding) for array, sharding in pairs if _is_batch(array)]
            self._batch = [
                jax.device_put(_batch_value(path, array, dict(self.work.vocabularies)), sharding)
                for array, sharding in batch
            ]

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes of one device: state, batch, temporaries and code."""
        found: Any = self.compiled.memory_analysis()
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        code = found.generated_code_size_in_bytes
        return found.argument_size_in_bytes + outputs + found.temp_size_in_bytes + code

    @property
    def memory_in_use(self) -> int | None:
        """Returns the most bytes that were in use on a device; None if jax does not count them."""
        found = [device.memory_stats() or {} for device in self.devices]
        return max((each.get("peak_bytes_in_use", 0) for each in found), default=0) or None

    def recompile(self, options: Mapping[str, str]) -> None:
        """Compiles the step again with more options of XLA's compiler; the state stays."""
        options = {**self._options, **options}
        self.compiled = _compile(self.record, self._exported, self.devices, options)

    def __call__(self) -> Callable[[], float]:
        """Starts a step and returns a function that waits for its loss."""
        *self._state, metrics = self.compiled(*self._state, *self._batch)
        metrics.copy_to_host_async()
        return lambda: float(np.asarray(metrics)[0])


def product_dtype(module: str) -> str:
    """Returns the dtype of most matrix product operations in a StableHLO module.

    The body of a loop counts once.
    """
    operations: collections.Counter[str] = collections.Counter()
    for contracted, left, result in _DOT.findall(module):
        *sizes, element = left.split("x")
        if element in _DTYPES:
            places = [int(place) for place in contracted.split(",") if place.strip()] or [-1]
            depth = math.prod(int(sizes[place]) for place in places)
            operations[_DTYPES[element]] += depth * math.prod(map(int, result.split("x")[:-1]))
    return max(operations, key=operations.__getitem__, default="float32")


def _load(path: str, name: str) -> tuple[ProgramRecord, jax_export.Exported]:
    record, exported, bodies = program_file.read(path)
    if record.name != name:
        raise UserError(
            f"{path} holds the program {record.name!r}, but {name!r} was expected; write it "
            f"with gshard-inspect --function={name} --program={path}"
        )
    if bodies:
        exported = bodies.get(platform_of(jax.devices()[0]), exported)
    return record, jax_export.deserialize(bytearray(exported))


def _devices(path: str, record: ProgramRecord) -> list[Device]:
    """Returns the devices of the mesh; JAX makes virtual CPU devices if it has only a CPU."""
    count = math.prod(_axes(record).values())
    with contextlib.suppress(RuntimeError):
        if jax.config.values["jax_num_cpu_devices"] < count:
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if len(found) < count:
        raise UserError(
            f"{path} is for --mesh={record.mesh}, {count} devices, but there are {len(found)} "
            f"({found[0].device_kind}); write it for as many, such as --mesh=data={len(found)}"
        )
    return found[:count]


def _axes(record: ProgramRecord) -> dict[str, int]:
    pairs = (axis.split("=") for axis in record.mesh.split(",") if axis)
    return {name: int(size) for name, size in pairs}


def _shardings(
    record: ProgramRecord, arrays: Sequence[Array], devices: Sequence[Device]
) -> list[jax.sharding.NamedSharding | None]:
    axes = _axes(record)
    arranged = np.array(devices).reshape(tuple(axes.values()))
    if record.device_order == "topology":
        from jax.experimental import mesh_utils

        arranged = mesh_utils.create_device_mesh(
            arranged.shape, devices=list(devices), allow_split_physical_axes=True
        )
    mesh = jax.sharding.Mesh(arranged, tuple(axes))
    return [array.sharding(mesh) for array in arrays]


def _compile(
    record: ProgramRecord,
    exported: jax_export.Exported,
    devices: Sequence[Device],
    options: Mapping[str, str] | None = None,
) -> jax.stages.Compiled:
    inputs = _shardings(record, record.inputs, devices)
    outputs = _shardings(record, record.outputs, devices)
    function = jax.jit(
        exported.call, donate_argnums=tuple(record.donated), out_shardings=tuple(outputs)
    )
    with using_partitioner(record.partitioner), jax.enable_x64(True):
        arguments = [
            jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=sharding)
            for array, sharding in zip(record.inputs, inputs, strict=True)
        ]
        return function.lower(*arguments).compile(dict(options) if options else None)


def _is_batch(array: Array) -> bool:
    return array.path.startswith("batch.")


def _drawn(
    path: str, step: str, record: ProgramRecord, devices: Sequence[Device]
) -> list[jax.Array]:
    """Returns the state from an init_state program; ValueError if it is not the step's state."""
    initial, exported = _load(path, INITIAL)
    found = [(a.path, a.shape, a.dtype, a.split) for a in initial.outputs]
    expected = [(a.path, a.shape, a.dtype, a.split) for a in record.inputs if not _is_batch(a)]
    if initial.mesh != record.mesh or found != expected:
        differ = [a[0] for a, b in zip(found, expected, strict=False) if a != b]
        raise UserError(
            f"--init_state={path} draws another state than {step} takes: "
            f"{len(found)} arrays on {initial.mesh or 'one device'}, {len(expected)} on "
            f"{record.mesh or 'one device'} expected"
            + (f"; the first that differs is {differ[0]}" if differ else "")
        )
    return list(_compile(initial, exported, devices)())


def _made_up(array: Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """Returns a synthetic array: small random weights, scales of 1, all else 0."""
    path, dtype = array.path, jnp.dtype(array.dtype)
    shape = tuple(array.shape)
    if not jnp.issubdtype(dtype, jnp.floating) or path.startswith("moments."):
        value = 0.0
    elif not shape or path.endswith("scale"):
        value = 1.0
    elif path.startswith("theta.") and len(shape) > 1:
        value = None
    else:
        value = 0.0
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


def _batch_value(path: str, array: Array, vocabularies: dict[str, int]) -> np.ndarray:
    """Returns a synthetic array of the batch; raises ValueError naming the file."""
    name = array.path
    try:
        return synthetic.make_array(name, array.shape, array.dtype, vocabularies.get(name))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


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
      mesh: axes and sizes.
      devices: number of devices.
      step_seconds: time of a step, median of all runs.
      fastest_seconds: time of a step in the fastest run.
      slowest_seconds: time of a step in the slowest run.
      tokens: tokens of a batch.
      tokens_per_second: tokens / step_seconds.
      flops: useful floating-point operations of a step.
      gemm_dtype: element type of the reference product.
      gemm_size: rows and columns of its matrices.
      gemm_rate: its rate on all devices together, in FLOP/s.
      mfu: flops / step_seconds / gemm_rate.
      compile_seconds: time of the compilation.
      peak_bytes: peak bytes of one device, from the compiler.
      memory_in_use: the most bytes in use on a device after the first steps, as jax counts them.
        None if jax does not count bytes on this device.
      first_loss: loss of the first step.
      last_loss: loss of the last step.
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
    path: str,
    initial: str | None,
    repeats: int,
    gemm_size: int | None,
    progress: Progress,
) -> ProgramTiming:
    """Measures a saved step; runs of steps alternate with runs of matrix products.

    Args:
      path: file of the training step.
      initial: file of an init_state program; None for synthetic weights.
      repeats: number of runs.
      gemm_size: rows and columns of the reference product; None chooses them for the device.
      progress: is told each stage as it begins.

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
    """Measures a step as `measure` does.

    Raises:
      UserError: names the step's file if its loss is not finite.
    """
    losses = [step()() for _ in range(3)]
    # Before the matrices of products take memory.
    memory_in_use = step.memory_in_use
    progress.begin("sizing the product")
    gemm_size = gemm_size or _large_enough(step.devices, step.gemm_dtype)
    product = products(step.devices, step.gemm_dtype, gemm_size)
    run = max(1, min(_LONGEST_RUN, round(_RUN_SECONDS / pipelined_seconds(step, 1))))
    once = pipelined_seconds(product, 1)
    step_seconds, product_seconds = [], []
    for repeat in range(repeats):
        progress.begin(f"measuring, {repeat + 1} of {repeats}")
        step_seconds.append(pipelined_seconds(step, run))
        count = max(1, round(step_seconds[-1] * run / once))
        product_seconds.append(pipelined_seconds(product, count))
    losses.append(step()())
    if not all(map(math.isfinite, losses)):
        raise _NotFiniteError(f"{step.path}: the loss is {losses[0]} and then {losses[-1]}")
    return _row(step, step_seconds, product_seconds, gemm_size, losses, memory_in_use)


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


def _row(
    step: SavedStep,
    step_seconds: list[float],
    product_seconds: list[float],
    gemm_size: int,
    losses: list[float],
    memory_in_use: int | None,
) -> ProgramTiming:
    devices, taken = len(step.devices), float(np.median(step_seconds))
    rate = devices * 2 * gemm_size**3 / float(np.median(product_seconds))
    return ProgramTiming(
        file=step.path,
        mesh=step.record.mesh,
        devices=devices,
        step_seconds=taken,
        fastest_seconds=min(step_seconds),
        slowest_seconds=max(step_seconds),
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
