"""Times a product and each collective, and compares results with NumPy's and published rates."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core import Device, UserError, cached, jax
from lingvo_gshard.layers import MixtureOfExperts, TransformerStack
from lingvo_gshard.runtime import SingleDeviceRuntime, SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.tools.benchmarks.step import StepCase, stack_cases
from lingvo_gshard.tools.console import libraries
from lingvo_gshard.tools.diagnosis.accelerator import trials
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing
from lingvo_gshard.training import Trainer
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.planning.machines.efficiencies import matmul_efficiency

_STEPS = 3
_LENGTH, _ROWS_PER_DEVICE = 16, 2
# float32 sums in another order differ by less; bfloat16 products of a TPU by more.
_LEAST_EQUAL = {"cpu": 1e-4}
_LEAST_EQUAL_OF_ACCELERATORS = 2e-2
_STRATEGY = "expert"


def check_step(devices: Sequence[Device]) -> Check:
    """Trains a few steps on one device and on all devices, and compares the two sets of weights.

    Experts and rows are split over all devices, so that a step has collectives of several kinds.
    """
    mesh = f"data={len(devices)}"
    case = _case(len(devices))
    options = SpmdOptions(partitioner="gspmd")
    split = SpmdRuntime(case.trainer, Partitioning.make(mesh, _STRATEGY), devices, options)
    whole = SingleDeviceRuntime(case.trainer)
    whole.init_state()
    split.load_state(whole.state())
    for _ in range(_STEPS):
        for runtime in (whole, split):
            runtime.train_step(case.batch).read()
    worst, path = _largest_difference(whole, split)
    found = f"{_STEPS} steps on {mesh}, strategy {_STRATEGY}"
    most = _LEAST_EQUAL.get(devices[0].platform, _LEAST_EQUAL_OF_ACCELERATORS)
    if not worst <= most:
        found += f": {path} differs by {worst:.1e} of its largest value"
        advice = "gshard-verify finds the layer; do not train on these devices before it is found"
        return Check("sharded step", State.FAILURE, found, advice)
    return Check("sharded step", State.OK, f"{found}: equal to one device within {worst:.0e}")


def _case(devices: int) -> StepCase:
    """Returns a small encoder with experts, and a batch that divides by the devices."""
    moe = MixtureOfExperts.params()
    moe.num_experts = max(devices, 2)
    # One group of tokens for each device.
    moe.group_size = _ROWS_PER_DEVICE * _LENGTH
    stack = TransformerStack.params().set(
        model_dim=32, hidden_dim=64, num_heads=4, num_layers=2, moe_every=2, moe=moe
    )
    cases = stack_cases(stack, Trainer.params(), _ROWS_PER_DEVICE * devices, _LENGTH)
    return cases[0]


def _largest_difference(whole: SingleDeviceRuntime, split: SpmdRuntime) -> tuple[float, str]:
    """Returns the largest difference of a weight, relative to its largest value, and its path."""
    expected = dict(whole.theta_on_host().flatten_items())
    worst, worst_path = 0.0, ""
    for path, found in split.theta_on_host().flatten_items():
        scale = max(float(np.abs(expected[path]).max()), 1e-3)
        difference = float(np.abs(found - expected[path]).max()) / scale
        if math.isnan(difference) or difference > worst:
            worst, worst_path = difference, path
    return worst, worst_path


_GIB = 2**30
# The quickstart needs 1.6 GiB of memory. Its checkpoints and caches need less disk than this.
_LEAST_MEMORY, _LEAST_DISK = 2 * _GIB, 2 * _GIB
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")
# Files that exist where a driver has found an accelerator -> what jax needs to use it.
_DRIVERS = {
    "/dev/nvidia0": ("an NVIDIA GPU", "pip install 'jax[cuda12]=={version}'"),
    "/dev/accel0": ("a TPU", "pip install 'jax[tpu]=={version}'"),
}


def check_host(directory: str = "") -> Iterator[Check]:
    """Yields the checks of cores, memory, limits and the disk of a run's directory."""
    yield Check("cores", State.OK, f"{len(os.sched_getaffinity(0))} cores")
    free = available_memory()
    is_enough = free >= _LEAST_MEMORY
    yield Check(
        "memory",
        State.OK if is_enough else State.FAILURE,
        f"{free / _GIB:.1f} GiB are free",
        "" if is_enough else "end other programs: the quickstart needs 2 GiB",
    )
    try:
        libraries.check_limits()
    except UserError as error:
        yield Check("limits", State.FAILURE, str(error), "see ulimit -a")
    for name, place in (("runs", directory or "."), ("cache", cached.directory("programs"))):
        yield _check_disk(name, place)


def available_memory() -> int:
    """Returns the bytes of memory that new programs may use, a container's limit included."""
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return min(available, int(limit)) if limit != "max" else available


def _check_disk(name: str, place: str) -> Check:
    path = pathlib.Path(place).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        advice = "choose another directory, or set XDG_CACHE_HOME" if name == "cache" else "cd"
        return Check(f"disk: {name}", State.FAILURE, f"{existing} cannot be written", advice)
    free = shutil.disk_usage(existing).free
    is_enough = free >= _LEAST_DISK
    return Check(
        f"disk: {name}",
        State.OK if is_enough else State.WARNING,
        f"{free / _GIB:.1f} GiB are free for {path}",
        "" if is_enough else "checkpoints of large models need more; remove old runs",
    )


def check_devices(devices: Sequence[Device]) -> Iterator[Check]:
    """Yields the checks of the devices that jax has found."""
    for kind, count in collections.Counter(d.device_kind for d in devices).items():
        first = next(d for d in devices if d.device_kind == kind)
        limit = (first.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / _GIB:.1f} GiB each for programs" if limit else ""
        virtual = " (virtual, on the cores above)" if first.platform == "cpu" and count > 1 else ""
        yield Check("devices", State.OK, f"{count} x {kind}{virtual}{memory}")
    if all(device.platform == "cpu" for device in devices):
        for file, (what, install) in _DRIVERS.items():
            if pathlib.Path(file).exists():
                found = f"this machine has {what} ({file}), but jax sees only the CPU"
                advice = install.format(version=jax.__version__)
                yield Check("devices", State.WARNING, found, advice)


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


def check_product(machine: trials.Machine) -> Check:
    """Times a matrix product on the first device, and computes some of its rows again."""
    device, dtype = machine.devices[0], machine.dtype
    size = _SIZES.get(device.platform, _ACCELERATOR_SIZE)
    generator = np.random.default_rng(0)
    left, right = (
        jax.device_put(generator.standard_normal((size, size), np.float32), device).astype(dtype)
        for _ in range(2)
    )
    multiply = jax.jit(lambda a, b: a @ b)
    product = jax.block_until_ready(multiply(left, right))
    flops = 2 * size**3
    timing = Timing(
        trials.seconds_of_call(lambda: multiply(left, right)), amount=flops, unit=trials.FLOPS
    )
    found = f"{size} x {size} in {dtype}: {timing.shown(timing.seconds)}"
    rows = np.linspace(0, size - 1, _CHECKED_ROWS, dtype=int)
    exact = np.asarray(left, np.float64)[rows] @ np.asarray(right, np.float64)
    error = np.abs(np.asarray(product, np.float64)[rows] - exact).max() / np.abs(exact).max()
    if not error <= (1e-4 if machine.is_virtual else 1e-2):
        advice = "the device computes wrong results: do not train on it"
        return Check("product", State.FAILURE, f"{found}; differs by {error:.1e}", advice, timing)
    chip = chips.of_device(device.platform, device.device_kind)
    if chip is None:
        found += " (no published rate to compare with)"
        return Check("product", State.OK, found, timing=timing)
    share = flops / timing.seconds / chip.peak(dtype)
    planned = flops / chip.peak(dtype) / matmul_efficiency(chip, flops, dtype).value
    timing = dataclasses.replace(
        timing, planned=planned, point=f'"product_efficiency": {{{size}: {share:.3f}}}'
    )
    found += f", {share:.0%} of the published rate of {chip.name}"
    if share < _LEAST_PRODUCT_SHARE:
        advice = "look for other programs on the device, and for its power and temperature limits"
        return Check("product", State.WARNING, found, advice, timing)
    return Check("product", State.OK, found, timing=timing)


def check_collectives(machine: trials.Machine, numbers: int = 0) -> Iterator[Check]:
    """Checks the result of each collective over all devices, and measures its rate.

    The rate is the bus bandwidth of NCCL's tests: the bytes that each device must send, over the
    time. Each device sends or receives so many float32 `numbers`; 0: many.
    """
    devices, count = machine.devices, machine.count
    if count < 2:
        yield Check("collectives", State.OK, "one device needs none")
        return
    numbers = numbers or _NUMBERS.get(devices[0].platform, _ACCELERATOR_NUMBERS)
    numbers = numbers // count * count
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
                # Some results are equal on all devices. The copy of every device is checked.
                check_vma=False,
            )
        )
        result = np.asarray(jax.block_until_ready(run(array))).reshape(count, -1)
        seconds, size = trials.seconds_of_call(functools.partial(run, array)), 4 * numbers
        timing = Timing(
            seconds,
            trials.planned_collective(name, size, machine),
            collective.sent * size,
            trials.SENT,
            trials.measured_point(name, size, seconds, machine),
        )
        yield _judged(name, np.array_equal(result, collective.expected(rows)), timing, devices[0])


def _judged(name: str, is_right: bool, timing: Timing, device: Device) -> Check:
    rate = timing.amount / timing.seconds
    found = f"{rate / 1e9:,.3g} GB/s from each device"
    if not is_right:
        advice = "the devices exchange wrong numbers: do not train on them"
        return Check(name, State.FAILURE, f"{found}; the result is wrong", advice, timing)
    chip = chips.of_device(device.platform, device.device_kind)
    if chip is None:
        return Check(name, State.OK, f"{found}, exact", timing=timing)
    share = rate / (chip.links * chip.link_bandwidth)
    found += f", exact; {share:.0%} of the published rate of all links"
    if share < _LEAST_LINK_SHARE:
        advice = "check the links: nvidia-smi topo -m, or the slice's shape"
        return Check(name, State.WARNING, found, advice, timing)
    return Check(name, State.OK, found, timing=timing)


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
            lambda x: lax.all_to_all(x, _AXIS, 0, 0, tiled=True), exchanged, part
        ),
        "collective-permute": _Collective(
            functools.partial(lax.ppermute, axis_name=_AXIS, perm=turned),
            lambda rows: np.roll(rows, 1, 0),
            1.0,
        ),
    }
