"""Adds up a trace into a profile: time by kind, layer and operation, and what stands out."""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Mapping

import msgspec

from lingvo_gshard.core import UserError, objects
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.operations import Operation
from lingvo_gshard.wings.planning.operation_rows import OPTIMIZER
from lingvo_gshard.wings.profiling import profile as profiles
from lingvo_gshard.wings.profiling import timeline
from lingvo_gshard.wings.profiling.trace import INPUT, Trace

_SHOWN_OPERATIONS = 10
_PICOSECONDS = 1e12
# The training step is among the programs that take the most time.
_MOST_PROGRAMS = 4
# The line of an accelerator's trace with operations that run while others compute.
_BACKGROUND = "Async XLA Ops"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Facts on the profiled steps that a trace does not tell. `Profile` lists the others.

    Attributes:
      layers: name scopes of all layers.
      kinds: kinds of layers, as `planning.kinds.kinds_of_layers` returns them.
      useful_flops: useful operations of all devices in a step, also of other processes.
      source_of: returns file and line of an operation's TensorFlow name, or "".
    """

    name: str
    steps: timeline.StepRange
    device_summary: str
    chip: str
    mesh: Mesh
    layers: frozenset[str]
    kinds: Mapping[str, str | None]
    busy_cores: float
    cores: int
    useful_flops: int
    tokens_per_step: int | None
    attainable: profiles.Rate | None
    source_of: Callable[[str], str]


class Summary:
    """Sums up the time of a training step: means over the devices and steps of a trace."""

    def __init__(self, trace: Trace, facts: StepFacts):
        """Divides the time of each device. Raises UserError if no step or operation is there."""
        if not any(trace.devices.values()):
            raise UserError("the trace has no operations of devices")
        self._facts = facts
        keys, self.program = _step_program(trace, facts)
        self._waits = [(span.start, span.end) for span in trace.spans(INPUT)]
        self._executions = _executions(trace, keys)
        self._divisions = {
            device: _divide(trace, device, keys, self.program) for device in sorted(trace.devices)
        }
        self._shares, self._active, self._hidden = (collections.Counter() for _ in range(3))
        for division in self._divisions.values():
            self._shares.update(division.shares)
            self._active.update(division.active)
            self._hidden.update(division.hidden)
        self._names = [name for name in self._shares if name is not None]
        self._slowest = heapq.nlargest(_SHOWN_OPERATIONS, self._names, self._shares.__getitem__)
        self._scale = _PICOSECONDS * facts.steps.count * len(self._divisions)
        start, end = trace.window
        self._total = (end - start) / _PICOSECONDS / facts.steps.count

    def profile(self) -> profiles.Profile:
        """Returns the profile."""
        facts, devices = self._facts, len(self._divisions)
        profile = profiles.Profile(
            name=facts.name,
            first_step=facts.steps.first,
            last_step=facts.steps.last,
            device_summary=facts.device_summary,
            chip=facts.chip,
            devices=devices,
            mesh=str(facts.mesh),
            seconds_per_step=self._total,
            tokens_per_step=facts.tokens_per_step,
            busy_cores=facts.busy_cores,
            cores=facts.cores,
            useful_flops=facts.useful_flops * devices // facts.mesh.size,
            executed_flops=sum(map(self._flops, self.program.operations)),
            attainable=facts.attainable,
            parts=self._parts(),
            layers=self._layers(),
            slowest=[self._operation(name) for name in self._slowest],
            collectives=self._collectives(),
            per_device=[
                profiles.DeviceTime(device=device, seconds=self._of(division))
                for device, division in self._divisions.items()
            ],
            findings=[],
        )
        return msgspec.structs.replace(profile, findings=of_profile(profile))

    def _flops(self, operation: Operation) -> int:
        """Returns the operations of products of all devices in a step."""
        return operation.matmul_flops * operation.times * len(self._divisions)

    def _parts(self) -> list[profiles.PartTime]:
        seconds: collections.Counter[str] = collections.Counter()
        for division in self._divisions.values():
            seconds.update(self._of(division))
        flops: collections.Counter[str] = collections.Counter()
        for operation in self.program.operations:
            flops[self.program.kind(operation.name)] += self._flops(operation)
        return [
            profiles.PartTime(
                part=part,
                seconds=taken,
                share=taken / self._total,
                flops=flops[part],
                flops_per_second=flops[part] / taken if flops[part] else None,
            )
            for part in profiles.PARTS
            if (taken := seconds[part] / len(self._divisions))
        ]

    def _layers(self) -> list[profiles.LayerTime]:
        """Returns the time of each layer and phase, most seconds first."""
        seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
        flops: collections.Counter[tuple[str, str]] = collections.Counter()
        for name in self._names:
            operation = self.program.find(name)
            seconds[operation.layer, operation.phase] += self._shares[name] / self._scale
        for operation in self.program.operations:
            flops[operation.layer, operation.phase] += self._flops(operation)
        return [
            profiles.LayerTime(
                layer=layer,
                phase=phase,
                seconds=taken,
                share=taken / self._total,
                flops=flops[layer, phase],
            )
            for (layer, phase), taken in sorted(seconds.items(), key=lambda item: -item[1])
        ]

    def _operation(self, name: str) -> profiles.OperationTime:
        operation = self.program.find(name)
        count = self._facts.steps.count * len(self._divisions)
        return profiles.OperationTime(
            name=name,
            opcode=operation.opcode,
            kind=self.program.kind(name),
            layer=operation.layer,
            phase=operation.phase,
            seconds=self._shares[name] / self._scale,
            active_seconds=self._active[name] / self._scale,
            executions=self._executions[name] / count,
            flops=operation.matmul_flops * operation.times,
            op_name=operation.op_name,
            source=self._facts.source_of(operation.op_name),
        )

    def _collectives(self) -> list[profiles.CollectiveTime]:
        """Returns the time of collectives by kind and axes, most seconds first."""
        groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for name in self._names:
            collective = self.program.find(name).collective
            if collective:
                axis = ",".join(collective.axes) or "all"
                groups[collective.kind, axis].append(name)
        rows = [self._collective(*key, names) for key, names in groups.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def _collective(self, kind: str, axis: str, names: list[str]) -> profiles.CollectiveTime:
        operations = {self.program.find(name) for name in names}
        return profiles.CollectiveTime(
            kind=kind,
            axis=axis,
            count=sum(operation.times for operation in operations),
            bytes=sum(o.collective.bytes * o.times for o in operations if o.collective),
            seconds=sum(self._active[name] for name in names) / self._scale,
            hidden_seconds=sum(self._hidden[name] for name in names) / self._scale,
            exposed_seconds=sum(self._shares[name] for name in names) / self._scale,
        )

    def _of(self, division: timeline.Division) -> dict[str, float]:
        """Returns the seconds per step of each part that takes any on one device."""
        found: dict[str, float] = collections.defaultdict(float)
        for name, time in division.shares.items():
            found[profiles.OTHER_PROGRAMS if name is None else self.program.kind(str(name))] += time
        waiting = timeline.overlap(division.idle, self._waits)
        found[profiles.PAUSES] = division.pauses
        found[profiles.INPUT_WAIT] = waiting
        found[profiles.HOST] = sum(end - start for start, end in division.idle) - waiting
        unit = _PICOSECONDS * self._facts.steps.count
        return {part: found[part] / unit for part in profiles.PARTS if found[part]}


def _step_program(trace: Trace, facts: StepFacts) -> tuple[frozenset[str], timeline.StepProgram]:
    """Returns keys and operations of the training step: the program that has an optimizer.

    If several programs or none have an optimizer, the program that runs longest is taken. Workers
    that train alone have one copy of the program each, under different keys.
    """
    seconds: collections.Counter[str] = collections.Counter()
    for events in trace.devices.values():
        for event in events:
            seconds[event.program] += event.end - event.start
    programs = {
        key: timeline.StepProgram(trace.module(key), facts.mesh, facts.layers, facts.kinds)
        for key, _ in seconds.most_common(_MOST_PROGRAMS)
    }
    trains = (
        key
        for key, program in programs.items()
        if any(operation.phase == OPTIMIZER for operation in program.operations)
    )
    step = next(trains, next(iter(programs)))
    names = trace.executed[step]
    copies = (key for key, others in trace.executed.items() if names == others)
    return frozenset(copies), programs[step]


def _divide(
    trace: Trace, device: int, step_keys: frozenset[str], program: timeline.StepProgram
) -> timeline.Division:
    events = trace.devices[device]
    enclosing = program.enclosing(e.operation for e in events if e.program in step_keys)
    intervals = [
        timeline.Interval(run.start, run.end, run.program, timeline.Role.ENCLOSING)
        for run in trace.runs[device]
    ]
    for event in events:
        if event.program not in step_keys:
            role, key = timeline.Role.COMPUTE, None
        else:
            key = event.operation
            is_transfer = program.find(key).collective or event.thread == _BACKGROUND
            role = timeline.Role.TRANSFER if is_transfer else timeline.Role.COMPUTE
            role = timeline.Role.ENCLOSING if key in enclosing else role
        intervals.append(timeline.Interval(event.start, event.end, key, role))
    return timeline.divide(intervals, trace.window)


def _executions(trace: Trace, step_keys: frozenset[str]) -> collections.Counter[str]:
    """Returns the number of executions of each operation of the step, over all devices."""
    return collections.Counter(
        event.operation
        for events in trace.devices.values()
        for event in events
        if event.program in step_keys
    )


# Smaller parts are not worth a sentence, unless they are the largest.
_LEAST_SHARE = 0.2

_ADVICE = objects.table_beside(__file__, "advice.toml", dict[str, str])


def of_profile(profile: profiles.Profile) -> list[str]:
    """Returns sentences on the largest part, and on each other part that takes much of the time."""
    if not profile.parts:
        return []
    parts = sorted(profile.parts, key=lambda part: -part.seconds)
    first = parts[0]
    found = [f"Largest part: {first.part}, {first.share:.0%} of the step."]
    for part in parts:
        if part.part in _ADVICE and (part is first or part.share >= _LEAST_SHARE):
            found.append(_ADVICE[part.part])
    return found
