"""How fast a saved training step runs, by jax alone, beside the device's rate for a product.

Neither TensorFlow nor a model is needed, only jax and this package's own files:

    python -m lingvo_gshard.tools.benchmarks.exported train_step.zip

does what `gshard-bench exported train_step.zip --json` does, without its table.
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

from lingvo_gshard.tools.benchmarks.exported_step import SavedStep
from lingvo_gshard.tools.benchmarks.timing import pipelined_seconds

REPEATS = 10
# A run of steps lasts about so long, but has at most so many steps.
_RUN_SECONDS, _LONGEST_RUN = 0.5, 20
# The product is made larger until it takes so long; one that is too short shows no full rate.
_PRODUCT_SECONDS, _SMALLEST_PRODUCT, _LARGEST_PRODUCT = 0.02, 2048, 8192


@dataclasses.dataclass
class Row:
    """A measured step; seconds are of a step, the median of `repeats` runs, and the extremes.

    mfu: flops / step_seconds over gemm_rate, the operations per second of a product of two square
    matrices of gemm_size on every device of the mesh at once. peak_bytes: on each device, as the
    compiler counts them.
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
    first_loss: float
    last_loss: float


def measure(
    path: str,
    initial: str | None,
    repeats: int,
    gemm_size: int | None,
    report: Callable[[str], None],
) -> Row:
    """Returns what a saved step takes: the median of `repeats` runs, in turns with products.

    initial: the file of an init_state program; None: weights are made up. gemm_size: None for one
    that suits the device. report: told in words what is under way. Raises ValueError naming the
    file that does not fit, or whose loss is not finite.
    """
    step = SavedStep(path, report, initial)
    losses = [step()() for _ in range(3)]
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
        hint = "" if initial else "; with --init_state=FILE weights are not made up"
        raise ValueError(f"{path}: the loss is {losses[0]} and then {losses[-1]}{hint}")
    return _row(step, step_seconds, product_seconds, gemm_size, losses)


def products(devices: Sequence[jax.Device], dtype: str, size: int) -> Callable:
    """Returns a function that starts a product on every device, and returns how to wait for it."""
    draw = jax.jit(lambda key: (jax.random.normal(key, (size, size)) * size**-0.5).astype(dtype))
    matrices = [jax.device_put(draw(jax.random.key(1)), device) for device in devices]
    multiply = jax.jit(jnp.matmul)

    def start() -> Callable[[], None]:
        results = [multiply(matrix, matrix) for matrix in matrices]
        return lambda: jax.block_until_ready(results)

    start()()
    return start


def device() -> str:
    """Returns what jax calls the device."""
    return jax.devices()[0].device_kind


def _row(
    step: SavedStep,
    step_seconds: list[float],
    product_seconds: list[float],
    gemm_size: int,
    losses: list[float],
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
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def _large_enough(devices: Sequence[jax.Device], dtype: str) -> int:
    size = _SMALLEST_PRODUCT
    while size < _LARGEST_PRODUCT and pipelined_seconds(products(devices, dtype, size), 1) < (
        _PRODUCT_SECONDS
    ):
        size *= 2
    return size


def main() -> None:
    """Prints the row of one file as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="a training step, saved by gshard-inspect --program")
    parser.add_argument("--init_state", help="its init_state program; else weights are made up")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how many runs are timed")
    parser.add_argument("--gemm_size", type=int, help="rows and columns of the product's matrices")
    given = parser.parse_args()
    row = measure(given.file, given.init_state, given.repeats, given.gemm_size, lambda _: None)
    print(json.dumps({"device": device(), "rows": [dataclasses.asdict(row)]}))


if __name__ == "__main__":
    main()
