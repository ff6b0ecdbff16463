"""Times a product and each collective, and compares results with NumPy's and published rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.lazy import Device, jax
from lingvo_gshard.planning.machines.chips import Chip
from lingvo_gshard.tools.benchmarks.timing import seconds_of
from lingvo_gshard.tools.diagnosis.check import Check, State

_REPEATS = 5
# Size of square matrices, by platform.
_SIZES = {"cpu": 2048}
_ACCELERATOR_SIZE = 8192
# Numbers that each device sends, by platform.
_NUMBERS = {"cpu": 2**20}
_ACCELERATOR_NUMBERS = 2**24
# Below these shares of a published rate, something slows the machine down.
_LEAST_PRODUCT_SHARE, _LEAST_LINK_SHARE = 0.5, 0.2
# Rows of a product that are computed again with NumPy.
_CHECKED_ROWS = 8
_AXIS = "d"


def check_product(device: Device, chip: Chip | None) -> Check:
    """Times a matrix product on a device, and computes some of its rows again.

    Args:
      device: the device.
      chip: its published figures; None if there are none.
    """
    is_cpu = device.platform == "cpu"
    dtype = "float32" if is_cpu else "bfloat16"
    size = _SIZES.get(device.platform, _ACCELERATOR_SIZE)
    generator = np.random.default_rng(0)
    left, right = (
        jax.device_put(generator.standard_normal((size, size), np.float32), device).astype(dtype)
        for _ in range(2)
    )
    multiply = jax.jit(lambda a, b: a @ b)
    product = jax.block_until_ready(multiply(left, right))
    seconds = min(
        seconds_of(lambda: jax.block_until_ready(multiply(left, right))) for _ in range(_REPEATS)
    )
    rate = 2 * size**3 / seconds
    found = f"{size} x {size} in {dtype}: {rate / 1e12:,.3g} TFLOP/s"
    rows = np.linspace(0, size - 1, _CHECKED_ROWS, dtype=int)
    exact = np.asarray(left, np.float64)[rows] @ np.asarray(right, np.float64)
    error = np.abs(np.asarray(product, np.float64)[rows] - exact).max() / np.abs(exact).max()
    if error > (1e-4 if is_cpu else 1e-2):
        advice = "the device computes wrong results: do not train on it"
        return Check("product", State.FAILURE, f"{found}; differs by {error:.1e}", advice)
    if chip is None:
        return Check("product", State.OK, f"{found} (no published rate to compare with)")
    share = rate / chip.peak(dtype)
    found += f", {share:.0%} of the published rate of {chip.name}"
    if share < _LEAST_PRODUCT_SHARE:
        advice = "look for other programs on the device, and for its power and temperature limits"
        return Check("product", State.WARNING, found, advice)
    return Check("product", State.OK, found)


def check_collectives(devices: Sequence[Device], chip: Chip | None) -> Iterator[Check]:
    """Yields a check of each collective over all devices: its result, and its rate.

    The rate is the bus bandwidth of NCCL's tests: the bytes that each device must send, by time.

    Args:
      devices: the devices; nothing is checked for one.
      chip: their published figures; None if there are none.
    """
    count = len(devices)
    if count < 2:
        yield Check("collectives", State.OK, "one device needs none")
        return
    numbers = _NUMBERS.get(devices[0].platform, _ACCELERATOR_NUMBERS) // count * count
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS))
    rows = np.random.default_rng(0).integers(-8, 8, (count, numbers)).astype(np.float32)
    array = jax.device_put(rows.reshape(-1), split)
    for name, collective in _collectives(count).items():
        run = jax.jit(
            jax.shard_map(
                collective.run,
                mesh=mesh,
                in_specs=jax.sharding.PartitionSpec(_AXIS),
                out_specs=jax.sharding.PartitionSpec(_AXIS),
                # Results that are the same on all devices are compared for each of them.
                check_vma=False,
            )
        )
        result = np.asarray(jax.block_until_ready(run(array))).reshape(count, -1)
        seconds = min(
            seconds_of(lambda run=run: jax.block_until_ready(run(array))) for _ in range(_REPEATS)
        )
        is_right = np.array_equal(result, collective.expected(rows))
        yield _judged(name, is_right, collective.sent * numbers * 4 / seconds, chip)


def _judged(name: str, is_right: bool, rate: float, chip: Chip | None) -> Check:
    """Returns the check of a collective with its rate, in bytes per second."""
    found = f"{rate / 1e9:,.3g} GB/s from each device"
    if not is_right:
        advice = "the devices exchange wrong numbers: do not train on them"
        return Check(name, State.FAILURE, f"{found}; the result is wrong", advice)
    if chip is None:
        return Check(name, State.OK, f"{found}, exact")
    share = rate / (chip.links * chip.link_bandwidth)
    found += f", exact; {share:.0%} of the published rate of all links"
    if share < _LEAST_LINK_SHARE:
        advice = "check the links: nvidia-smi topo -m, or the slice's shape"
        return Check(name, State.WARNING, found, advice)
    return Check(name, State.OK, found)


@dataclasses.dataclass(frozen=True)
class _Collective:
    """A collective, and what is known of it.

    Attributes:
      run: returns a device's result, from its own numbers.
      expected: returns all results, from the numbers of all devices [devices, numbers].
      sent: the share of its numbers that a device must send at least.
    """

    run: Callable[[jax.Array], jax.Array]
    expected: Callable[[np.ndarray], np.ndarray]
    sent: float


def _collectives(count: int) -> dict[str, _Collective]:
    """Returns the collectives by name. What each must send is given by NCCL's tests:

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    lax, part = jax.lax, (count - 1) / count
    turned = [(index, (index + 1) % count) for index in range(count)]

    def exchanged(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(count, count, -1).swapaxes(0, 1).reshape(count, -1)

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x[: len(x) // count], _AXIS, tiled=True)

    def gathered(rows: np.ndarray) -> np.ndarray:
        return np.broadcast_to(rows[:, : rows.shape[1] // count].reshape(-1), rows.shape)

    return {
        "all-reduce": _Collective(
            functools.partial(lax.psum, axis_name=_AXIS),
            lambda rows: np.broadcast_to(rows.sum(0), rows.shape),
            2 * part,
        ),
        "all-gather": _Collective(gather, gathered, part),
        "reduce-scatter": _Collective(
            functools.partial(lax.psum_scatter, axis_name=_AXIS, tiled=True),
            lambda rows: rows.sum(0).reshape(count, -1),
            part,
        ),
        "all-to-all": _Collective(
            lambda x: lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
            exchanged,
            part,
        ),
        "collective-permute": _Collective(
            functools.partial(lax.ppermute, axis_name=_AXIS, perm=turned),
            lambda rows: np.roll(rows, 1, 0),
            1.0,
        ),
    }
