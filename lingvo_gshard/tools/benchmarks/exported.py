"""Measures the speed of a saved training step, relative to matrix products on the same devices.

Needs neither TensorFlow nor a model, only JAX and this package:

    python -m lingvo_gshard.tools.benchmarks.exported train_step.zip

prints the JSON of `gshard-bench exported train_step.zip --json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.tools.benchmarks.exported_step import SavedStep
from lingvo_gshard.tools.benchmarks.timing import pipelined_seconds

REPEATS = 10
# Duration of a run of steps in seconds, and its maximum number of steps.
_RUN_SECONDS, _LONGEST_RUN = 0.5, 20
# The reference product grows until it takes this long: short products do not reach the full rate.
_PRODUCT_SECONDS, _SMALLEST_PRODUCT, _LARGEST_PRODUCT = 0.02, 2048, 8192


@dataclasses.dataclass
class Row:
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
      memory_in_use: the most bytes in use on a device when the first steps were done, as jax counts
        them; None if it does not count them here.
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
    report: Callable[[str], None],
) -> Row:
    """Measures a saved step; runs of steps alternate with runs of matrix products.

    Args:
      path: file of the training step.
      initial: file of an init_state program; None for synthetic weights.
      repeats: number of runs.
      gemm_size: rows and columns of the reference product; None chooses them for the device.
      report: called with each stage.

    Raises:
      UserError: names the file that cannot be run, or whose loss is not finite.
    """
    try:
        return measure_step(SavedStep(path, report, initial), repeats, gemm_size, report)
    except _NotFiniteError as error:
        hint = "" if initial else "; pass real weights with --init_state=FILE"
        raise UserError(f"{error}{hint}") from None


def measure_step(
    step: SavedStep, repeats: int, gemm_size: int | None, report: Callable[[str], None]
) -> Row:
    """Measures a step as `measure` does.

    Raises:
      UserError: names the step's file if its loss is not finite.
    """
    losses = [step()() for _ in range(3)]
    # Before the matrices of products take memory.
    memory_in_use = step.memory_in_use
    report("sizing the product")
    gemm_size = gemm_size or _large_enough(step.devices, step.gemm_dtype)
    product = products(step.devices, step.gemm_dtype, gemm_size)
    run = max(1, min(_LONGEST_RUN, round(_RUN_SECONDS / pipelined_seconds(step, 1))))
    once = pipelined_seconds(product, 1)
    step_seconds, product_seconds = [], []
    for repeat in range(repeats):
        report(f"measuring, {repeat + 1} of {repeats}")
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
) -> Row:
    devices, taken = len(step.devices), float(np.median(step_seconds))
    rate = devices * 2 * gemm_size**3 / float(np.median(product_seconds))
    return Row(
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
    row = measure(given.file, given.init_state, given.repeats, given.gemm_size, lambda _: None)
    print(json.dumps({"device": device(), "rows": [dataclasses.asdict(row)]}))


if __name__ == "__main__":
    main()
