"""The planner: compiles a program for a topology and says what it needs, does and costs there."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.hlo import reader as hlo_operations
from lingvo_gshard.hlo import text as hlo_text
from lingvo_gshard.hlo.reader import OperationList
from lingvo_gshard.planning import compilation, memory, roofline
from lingvo_gshard.planning.compilation import Compiled
from lingvo_gshard.planning.machines import topologies as topologies_lib
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan, Row
from lingvo_gshard.planning.progress import Progress, ignore_progress
from lingvo_gshard.planning.roofline import TimedOperation
from lingvo_gshard.runtime.partition import Partitioned
from lingvo_gshard.runtime.program.program import Program, bytes_of
from lingvo_gshard.runtime.program.step_programs import BatchSpecs, train_program
from lingvo_gshard.sharding.listing import WeightRow, split_in_words, weight_rows
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks import flops
from lingvo_gshard.tasks.token_loss import LOSS_SCOPE
from lingvo_gshard.training.trainer import Trainer

_PACKAGES = ("jax", "jaxlib", "libtpu", "tensorflow")
_KINDS = {"theta.": memory.WEIGHTS, "moments.": memory.MOMENTS, "averages.": memory.MOMENTS}
# What layouts of arguments may begin with, beside letters.
_LAYOUT_KINDS = (memory.WEIGHTS, memory.MOMENTS)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A program to plan, and what is known of it that its text does not say.

    classes: of each input, what its memory is for. layers: scopes of all layers; None: as names
    have them. useful_flops: of all devices in one step; None: not known.
    """

    program: Program
    name: str
    classes: tuple[str, ...]
    layers: frozenset[str] | None = None
    tensors: tuple[Row, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    useful_flops: int | None = None
    tokens: int | None = None


def plan(
    function: Callable[..., Any],
    specs: Sequence[Any],
    topology: str,
    *,
    mesh: str | None = None,
    strategy: str = "replicated",
    layouts: Sequence[Any] | None = None,
    donate: Sequence[int] = (),
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
    progress: Progress = ignore_progress,
) -> Plan:
    """Returns the plan of any TensorFlow function on a topology, such as "v3:32x32".

    specs: nested structures of tf.TensorSpecs, one for each argument. mesh: axes over the devices;
    None: data=N for all of them. The rest is as `lingvo_gshard.partition` takes it; arrays whose
    layout begins with "weights:" or "moments:" count as such, all others as inputs.

    Raises ValueError for an unknown topology, a mesh that does not fit it, and what `partition`
    raises.
    """
    machine = topologies_lib.get(topology)
    partitioning = Partitioning.make(mesh or f"data={machine.devices}", strategy, overrides)
    compilation.check_mesh(partitioning.mesh, machine)
    devices = machine.compile_devices()
    progress("tracing and lowering")
    partitioned = Partitioned(function, partitioning, devices, layouts, donate, partitioner)
    subject = _subject(partitioned, specs, partitioning)
    return plan_program(subject, partitioning, machine, progress=progress)


def _subject(partitioned: Partitioned, specs: Sequence[Any], partitioning: Partitioning) -> Subject:
    """A function, lowered, with what the layouts of its arguments say of it."""
    program = partitioned.lower(*specs)
    layouts = [
        layout
        for position, argument in enumerate(specs)
        for layout in partitioned.layouts_of(position, argument)
    ]
    classes, tensors, parameters = [], [], 0
    for array, layout in zip(program.inputs, layouts, strict=True):
        kind, _, letters = layout.rpartition(":") if isinstance(layout, str) else ("", "", "")
        kind = kind.strip() if kind.strip() in _LAYOUT_KINDS else memory.INPUTS
        classes.append(kind)
        if kind == memory.INPUTS:
            continue
        elements = math.prod(array.shape)
        parameters += elements if kind == memory.WEIGHTS else 0
        row = WeightRow(
            path=array.path,
            layout=letters.strip(),
            shape=array.shape,
            dtype=array.dtype,
            split=split_in_words(letters.strip(), array.split, partitioning),
            bytes=elements * array.struct.dtype.itemsize,
            bytes_per_device=bytes_of(array, program.mesh),
            note="",
        )
        tensors.append(_tensor(row, kind))
    return Subject(
        program,
        program.name,
        tuple(classes),
        tensors=tuple(tensors),
        parameters=(parameters, parameters),
    )


def plan_step(
    trainer: Trainer,
    batch: BatchSpecs,
    partitioning: Partitioning,
    topology: Topology,
    name: str,
    partitioner: str = "gspmd",
    tokens: float | None = None,
    progress: Progress = ignore_progress,
) -> Plan:
    """Returns the plan of a trainer's training step.

    tokens: to train on in all, for which the plan says what they cost.

    Raises ValueError if the mesh does not fit the topology, and what `compilation.compile_for`
    raises.
    """
    compilation.check_mesh(partitioning.mesh, topology)
    progress("tracing and lowering")
    # Before the step is traced, which takes long: the compiler may be missing or know no such TPU.
    topology.compile_devices()
    subject = step_subject(trainer, batch, partitioning, name, partitioner)
    return plan_program(subject, partitioning, topology, tokens, progress)


def step_subject(
    trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning, name: str, partitioner: str
) -> Subject:
    """Returns a trainer's training step, lowered, with what its layers say of it."""
    program, _ = train_program(trainer, partitioning, partitioner, batch)
    specs = trainer.state_specs()
    weights = specs.theta.flatten()
    scopes = {scope_name(path) for path in trainer.task.layer_paths()}
    tensors = [(row, memory.WEIGHTS) for row in weight_rows(weights, partitioning)]
    tensors += [
        (row, memory.MOMENTS)
        for row in weight_rows(specs.moments.flatten(), partitioning, "moments")
    ]
    return Subject(
        program=program,
        name=name,
        classes=tuple(_kind(array.path) for array in program.inputs),
        layers=frozenset(scopes - {""} | {LOSS_SCOPE}),
        tensors=tuple(_tensor(row, kind) for row, kind in tensors),
        parameters=(
            sum(tf.TensorShape(spec.shape).num_elements() for spec in weights),
            flops.active_parameters(trainer.task),
        ),
        useful_flops=trainer.task.step_flops(batch),
        tokens=trainer.task.target_tokens(batch),
    )


def plan_program(
    subject: Subject,
    partitioning: Partitioning,
    topology: Topology,
    tokens: float | None = None,
    progress: Progress = ignore_progress,
) -> Plan:
    """Returns the plan of a program on a topology.

    Raises ValueError if the mesh does not fit it, and what `compilation.compile_for` raises.
    """
    program = subject.program
    compiled = compilation.compile_for(program, topology, progress)
    progress("reading the compiled program")
    module = hlo_text.parse_module(compiled.text)
    found = hlo_operations.operations_of_text(compiled.text, program.mesh, subject.layers)
    timed = roofline.time_operations(found.operations, topology, program.mesh)
    step = roofline.step_time(timed)
    sizes = memory.by_class(program, subject.classes, compiled.memory, module)
    capacity = topology.chip.usable_bytes
    work = _flops(timed, subject, topology.devices)
    return Plan(
        name=subject.name,
        topology=topology.name,
        chip=topology.chip.name,
        devices=topology.devices,
        compiler=topology.compiler,
        mesh=str(program.mesh),
        strategy=program.strategy,
        strategy_name=partitioning.strategy.name,
        partitioner=program.partitioner,
        fits=_fits(compiled, sizes["peak"], topology),
        bytes_per_device={**sizes, "capacity": capacity},
        parameters=dict(zip(("total", "active"), subject.parameters, strict=True)),
        tensors=list(subject.tensors),
        largest_temporaries=memory.largest_results(module, subject.layers),
        collectives=_collectives(timed, step.communication_seconds),
        flops=work,
        layers=_layers(timed),
        seconds_per_step=step.seconds,
        seconds_per_step_bound=step.seconds_bound,
        steps_per_second=_rate(1, step.seconds),
        steps_per_second_bound=_rate(1, step.seconds_bound),
        tokens_per_step=subject.tokens,
        tokens_per_second=_rate(subject.tokens, step.seconds),
        mfu=roofline.utilization(work["useful"], step.seconds, topology) if step.seconds else None,
        budget=_budget(tokens, subject, step.seconds, topology),
        remedies=[],
        compile_seconds=compiled.seconds,
        versions=_versions(),
        notes=_notes(compiled, found, partitioning, topology),
    )


def _fits(compiled: Compiled, peak: int, topology: Topology) -> bool:
    """What the chip's own compiler found, where there is one, else what the sum of bytes says."""
    if topology.compiler == "tpu":
        return not compiled.refused
    return peak <= topology.chip.usable_bytes


def _kind(path: str) -> str:
    return next((k for prefix, k in _KINDS.items() if path.startswith(prefix)), memory.INPUTS)


def _rate(amount: int | None, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None


def _tensor(row: WeightRow, kind: str) -> Row:
    record = dataclasses.asdict(row)
    note = record.pop("note")
    layer = scope_name(row.path.partition("/")[0].rpartition(".")[0])
    return {**record, "shape": list(row.shape), "kind": kind, "layer": layer, "note": note}


def _flops(timed: Sequence[TimedOperation], subject: Subject, devices: int) -> Row:
    """What a device's matrix products do in a step."""
    done = collections.Counter()
    for operation in (t.operation for t in timed):
        amount = operation.matmul_flops * operation.times
        done["executed"] += amount
        if operation.dispatch:
            done["dispatch"] += amount
        elif operation.phase == "rematerialized":
            done["rematerialized"] += amount
    rest = done["executed"] - done["dispatch"] - done["rematerialized"]
    useful = rest if subject.useful_flops is None else subject.useful_flops // devices
    names = ("executed", "dispatch", "rematerialized")
    return {"useful": useful, **{n: done[n] for n in names}, "padding": max(rest - useful, 0)}


def _collectives(timed: Sequence[TimedOperation], all_seconds: float) -> list[Row]:
    """A row for each kind, axis, layer, phase, type and size; most seconds first."""
    rows: dict[tuple, Row] = {}
    for each in timed:
        operation, call = each.operation, each.operation.collective
        if call is None:
            continue
        row = {
            "kind": call.kind,
            "axis": ",".join(call.axes) or "all",
            "layer": operation.layer,
            "phase": operation.phase,
            "dtype": call.dtype,
            "bytes": call.bytes,
        }
        row = rows.setdefault(
            tuple(row.values()), {**row, "count": 0, "seconds_bound": 0.0, "seconds": 0.0}
        )
        row["count"] += operation.times
        row["seconds_bound"] += each.communication_seconds
        row["seconds"] += each.seconds
    for row in rows.values():
        row["share"] = row["seconds_bound"] / all_seconds if all_seconds else 0.0
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _layers(timed: Sequence[TimedOperation]) -> list[Row]:
    """A row for each layer, phase and number of times, in the order of its first operation."""
    rows: dict[tuple, Row] = {}
    sums = ("compute_seconds", "memory_seconds", "communication_seconds", "seconds_bound")
    for each in timed:
        operation = each.operation
        key = (operation.layer, operation.phase, operation.times)
        row = rows.setdefault(
            key,
            dict(zip(("layer", "phase", "times"), key, strict=True))
            | dict.fromkeys(("flops", "bytes"), 0)
            | dict.fromkeys((*sums, "seconds"), 0.0),
        )
        row["flops"] += operation.matmul_flops * operation.times
        row["bytes"] += operation.bytes * operation.times
        for name in (*sums, "seconds"):
            row[name] += getattr(each, name)
    return list(rows.values())


def _budget(
    tokens: float | None, subject: Subject, seconds: float, topology: Topology
) -> Row | None:
    if not tokens or not subject.tokens:
        return None
    found = roofline.budget(tokens, seconds / subject.tokens, topology)
    return {**dataclasses.asdict(found), "sources": list(found.sources)}


def _versions() -> dict[str, str]:
    versions = {"lingvo_gshard": lingvo_gshard.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _notes(
    compiled: Compiled, found: OperationList, partitioning: Partitioning, topology: Topology
) -> list[str]:
    whole = [
        f"{row.operation} is made whole on every device: from {row.before} to {row.after}"
        for row in compiled.made_whole
    ]
    unused = [
        f"strategy {partitioning.strategy.name} splits nothing over axis {axis}"
        for axis in partitioning.unused_axes
    ]
    notes = [*filter(None, [compiled.note]), *topology.notes, *found.notes, *unused, *whole]
    peak = compiled.memory["peak"]
    if peak > topology.chip.usable_bytes and _fits(compiled, peak, topology):
        notes.append(
            "the compiler placed all buffers in the device's memory, although their sum is larger "
            "than that: of those that share a place both are counted"
        )
    return notes
