"""Trial: a function computed by devices, compared with a reference, timed, and planned.

The program that was compiled here is planned, so that both times are of the same operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import Device, UserError, jax, tf
from lingvo_gshard.runtime import Executable, platform_of
from lingvo_gshard.sharding import HARDWARE, PLATFORMS, Mesh, Partitioning, is_interpreted
from lingvo_gshard.tools.benchmarks.timing import pipelined_seconds
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning import overlap, roofline
from lingvo_gshard.wings.planning.machines import chips, topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology

# Units of rates.
FLOPS, READ, SENT = "TFLOP/s", "GiB/s read", "GiB/s sent"
WRONG = "the devices compute wrong results here"
# A run of calls takes about this long, and the best of some runs counts.
_RUN_SECONDS, _MOST_CALLS, _RUNS = 0.1, 50, 3
# The largest difference from a reference, by the largest value. XLA multiplies float32 in fewer
# bits on accelerators.
_TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
_ON_ACCELERATORS = 2e-2


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this process, which are checked."""

    devices: Sequence[Device]

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def is_virtual(self) -> bool:
        """Whether the devices are CPUs, whose times say nothing of accelerators."""
        return self.devices[0].platform == "cpu"

    @property
    def platform(self) -> str:
        """The platform whose kernels the devices have; "" for none."""
        found = platform_of(self.devices[0])
        return found if found in HARDWARE else ""

    @property
    def kernel_platforms(self) -> tuple[str, ...]:
        """The platforms whose kernels can be computed: CPUs compute all of them step by step."""
        if self.is_virtual:
            return tuple(filter(is_interpreted, PLATFORMS))
        return (self.platform,) if self.platform else ()

    @property
    def dtype(self) -> str:
        """The type of numbers to compute with."""
        return "float32" if self.is_virtual else "bfloat16"

    def first(self) -> Machine:
        """Returns the first device alone."""
        return Machine(self.devices[:1])

    @functools.cached_property
    def topology(self) -> Topology | None:
        """The devices as a topology to plan for; None if plans know no such machine."""
        first, count = self.devices[0], self.count
        chip = chips.of_device(first.platform, first.device_kind)
        if first.platform == "cpu":
            return topologies.get(f"cpu:{count}")
        if chip is None:
            return None
        hosts = len({device.process_index for device in self.devices})
        name = f"gpu:{chip.key}:{hosts}x{count // hosts}"
        if first.platform == "tpu":
            places = np.array([device.coords for device in self.devices])
            shape = (np.ptp(places, axis=0) + 1)[: chip.torus_dimensions]
            name = f"{chip.key}:{'x'.join(map(str, shape))}"
        try:
            found = topologies.get(name)
        except UserError:
            return None
        return found if found.devices == count else None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A function to compute, and what it must return.

    Attributes:
      function: a function of TensorFlow that returns a list of tensors.
      expected: computes the results in another way; a NaN stands for any number. None: only the
        time is of interest.
      unit: what its rate counts: `FLOPS`, or the bytes that a device has `READ` or `SENT`.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    expected: Callable[[], Sequence[np.ndarray]] | None = None
    mesh: str = "data=1"
    strategy: str = "replicated"
    unit: str = FLOPS


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A trial on a machine.

    Attributes:
      error: the largest difference from the reference, by the largest value; NaN if a result is
        not finite.
      seconds: the time of one call.
      planned: the time by plan; None if there is none.
    """

    error: float
    seconds: float
    planned: float | None
    operations: Sequence[Operation]

    @property
    def flops(self) -> float:
        """FLOPs of the products of one device."""
        return float(sum(op.matmul_flops * op.times for op in self.operations))

    def timing(self, unit: str, point: str = "") -> Timing:
        """Returns the time as a rate."""
        calls = [(op.collective, op.times) for op in self.operations if op.collective]
        amount = {
            FLOPS: self.flops,
            READ: sum(op.bytes * op.times for op in self.operations),
            SENT: sum(c.bytes * n * (c.group_size - 1) / c.group_size for c, n in calls),
        }[unit]
        return Timing(self.seconds, self.planned, amount, unit if amount else "", point)


def run(trial: Trial, machine: Machine, platform: str) -> Outcome:
    """Computes a trial on a machine by the kernels of a platform; "" for none."""
    partitioning = Partitioning.make(trial.mesh, trial.strategy)
    used = platform if is_interpreted(platform) else None
    called = Partitioned(trial.function, partitioning, machine.devices, platform=used)
    executable = called.compile(*trial.arguments)
    flat = tf.nest.flatten(list(trial.arguments))
    program = executable.program
    mesh = jax.sharding.Mesh(program.mesh.arrange(machine.devices), program.mesh.names)
    placed = [spec.put(x, mesh) for spec, x in zip(program.inputs, flat, strict=True)]
    results = [np.asarray(x) for x in executable(*placed)]
    error = _error(results, trial.expected() if trial.expected else None)
    operations, planned = _plan(executable, machine)
    return Outcome(error, seconds_of_call(lambda: executable(*placed)), planned, operations)


def seconds_of_call(call: Callable[[], Any]) -> float:
    """Returns the seconds of one call, of many that follow each other; the fastest run counts."""

    def start() -> Callable[[], object]:
        results = call()
        return lambda: jax.block_until_ready(results)

    once = pipelined_seconds(start, 1)
    count = max(1, min(_MOST_CALLS, math.ceil(_RUN_SECONDS / once)))
    if count == 1:
        return once
    return min(pipelined_seconds(start, count) for _ in range(_RUNS))


def planned_collective(kind: str, size: int, machine: Machine) -> float | None:
    """Returns the seconds that plans assume for a collective over all devices.

    `size` is the bytes of one device's operand or result, whichever is larger.
    """
    if machine.topology is None:
        return None
    mesh = Mesh((("data", machine.count),))
    collective = Collective(kind, ("data",), machine.count, "float32", size)
    operation = Operation(kind, kind, "", "other", collective=collective)
    (timed,) = roofline.time_operations([operation], machine.topology, mesh)
    return timed.seconds


def measured_point(kind: str, size: int, seconds: float, machine: Machine) -> str:
    """Returns a collective over all devices as wings/planning/machines/efficiencies.py has it."""
    name = machine.topology.name if machine.topology else machine.devices[0].device_kind
    return f'MeasuredCollective("{name}", "{kind}", {machine.count}, {size}, {seconds:.3g}, _HERE)'


def judged(
    name: str, outcome: Outcome, dtype: str, machine: Machine, timing: Timing | None
) -> Check:
    """Returns the check of a trial. Results that differ too much are a failure."""
    most = _TOLERANCES[dtype] if machine.is_virtual else _ON_ACCELERATORS
    if not outcome.error <= most:
        found = f"differs from the reference by {outcome.error:.1e} of its largest value"
        return Check(name, State.FAILURE, found, WRONG, timing)
    return Check(name, State.OK, f"equal to the reference within {outcome.error:.0e}", "", timing)


def _error(results: Sequence[np.ndarray], expected: Sequence[np.ndarray] | None) -> float:
    """Returns the largest difference of a result by its largest value; NaN if one is missing."""
    worst = 0.0
    for index, result in enumerate(results):
        found = result.astype(np.float64)
        wanted = found if expected is None else np.asarray(expected[index], np.float64)
        # A reference may leave numbers open.
        known = np.isfinite(wanted) if expected is not None else np.full(found.shape, True)
        difference = np.abs(found - wanted)[known].max(initial=0.0)
        error = difference / max(np.abs(wanted[known]).max(initial=0.0), 1e-30)
        worst = error if math.isnan(error) else max(worst, error)
    return float(worst)


def _plan(executable: Executable, machine: Machine) -> tuple[list[Operation], float | None]:
    """Returns the operations of a compiled program, and its time by plan."""
    topology, mesh = machine.topology, executable.program.mesh
    slices = hlo.Slices(1, is_split=False)
    found = hlo.read_operations(executable.hlo_module(), mesh, None, slices).operations
    if topology is None:
        return found, None
    timed = overlap.hide(roofline.time_operations(found, topology, mesh), lambda _: False)
    return found, roofline.step_time(timed).seconds
