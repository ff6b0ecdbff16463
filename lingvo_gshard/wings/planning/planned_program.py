"""PlannedProgram: a lowered program with the facts that its HLO does not contain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import LOSS_SCOPE, scope_name
from lingvo_gshard.runtime import Array, LayerNames, Program, bytes_of, train_program
from lingvo_gshard.sharding import Mesh, Partitioning, recording, sharding_tables
from lingvo_gshard.tasks import BatchSpecs, Task
from lingvo_gshard.training import Trainer
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.facts.step import step_flops
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.planning import memory
from lingvo_gshard.wings.planning.operation_rows import kinds_of_layers
from lingvo_gshard.wings.planning.plan.plan import ParameterCounts, TensorRow
from lingvo_gshard.wings.tracing.source_lines import GraphLines

_MEMORY_CLASSES = {
    "theta.": memory.WEIGHTS,
    "moments.": memory.MOMENTS,
    "averages.": memory.MOMENTS,
}
# Prefixes that an argument's layout may have, as in "weights:MH".
_LAYOUT_PREFIXES = (memory.WEIGHTS, memory.MOMENTS)


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A lowered program with the facts that its HLO does not contain.

    Attributes:
      layers: name scopes of all layers; None takes the scopes from operation names.
      kinds: kinds of layers, as `kinds.kinds_of_layers` returns them; {} if they are unknown.
      useful_flops: useful operations of all devices in one step; None if unknown.
      stated_flops: operations of all devices in one step as the program states them before it is
        partitioned, without recomputation. No more are useful. None if they are unknown.
      tokens: target positions of a batch; None if the program has no batch.
      notes: what the plan must say about these facts.
      lines: the lines of code that made the program's operations; None if they are unknown.
      kernel_flops: regular expression for the names of kernels of other libraries -> FLOPs of one
        call on one device.
    """

    program: Program
    name: str
    classes: tuple[str, ...]
    layers: frozenset[str] | None
    tensors: tuple[TensorRow, ...]
    parameters: ParameterCounts
    useful_flops: int | None = None
    stated_flops: int | None = None
    tokens: int | None = None
    kinds: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lines: GraphLines | None = None
    kernel_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)


def lower_function(
    partitioned: Partitioned, specs: Sequence[Any], partitioning: Partitioning
) -> PlannedProgram:
    """Lowers a function; the prefixes of its arguments' layouts give their memory classes."""
    program = partitioned.lower(*specs)
    layouts = [
        layout
        for position, argument in enumerate(specs)
        for layout in partitioned.layouts_of(position, argument)
    ]
    classes, tensors, parameters = [], [], 0
    for array, layout in zip(program.inputs, layouts, strict=True):
        prefix, _, letters = layout.rpartition(":") if isinstance(layout, str) else ("", "", "")
        kind = prefix.strip() if prefix.strip() in _LAYOUT_PREFIXES else memory.INPUTS
        classes.append(kind)
        if kind == memory.INPUTS:
            continue
        parameters += math.prod(array.shape) if kind == memory.WEIGHTS else 0
        layout = letters.strip()
        split = sharding_tables.split_in_words(layout, array.split or (), partitioning)
        tensors.append(row_of(array, program.mesh, kind, _layer_of(array.path), split, layout))
    return PlannedProgram(
        program,
        program.name,
        tuple(classes),
        layers=None,
        tensors=tuple(tensors),
        parameters=ParameterCounts(total=parameters, active=parameters),
    )


def lower_step(
    trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning, name: str, partitioner: str
) -> PlannedProgram:
    """Lowers a trainer's training step, with the facts that its layers know."""
    partitioning = partitioning.with_padded_state()
    with recording.record() as recorded:
        program, _ = train_program(trainer, partitioning, partitioner, batch)
    specs = trainer.state_specs()
    weights, kind = specs.theta.flatten(), trainer.sharded_parts["theta"]
    rows = sharding_tables.weight_rows
    tensors = [(row, memory.WEIGHTS) for row in rows(weights, partitioning, kind)]
    moments = rows(specs.moments.flatten(), partitioning, "moments")
    tensors += [(row, memory.MOMENTS) for row in moments]
    return PlannedProgram(
        program=program,
        name=name,
        classes=tuple(memory_class(array.path) for array in program.inputs),
        layers=layer_scopes(trainer.task),
        kinds=kinds_of_layers(trainer.task),
        tensors=tuple(_tensor_row(row, kind) for row, kind in tensors),
        parameters=ParameterCounts(
            total=sum(math.prod(spec.shape) for spec in weights),
            active=active_parameters(trainer.task),
        ),
        useful_flops=step_flops(trainer.task, batch),
        tokens=trainer.task.target_tokens(batch),
        lines=GraphLines(recorded.graphs),
    )


def layer_scopes(task: Task) -> frozenset[str]:
    """Returns the name scopes of all layers of a task, and the name scope of its loss."""
    scopes = {scope_name(path) for path in task.layer_paths()}
    return frozenset(scopes - {""} | {LOSS_SCOPE})


def layer_names(task: Task) -> LayerNames:
    """Returns the layers of a task, to be saved with the programs of its steps."""
    return LayerNames(
        tuple(sorted(layer_scopes(task))), tuple(sorted(kinds_of_layers(task).items()))
    )


def memory_class(path: str) -> str:
    """Returns the memory class of a training step's input."""
    found = (kind for prefix, kind in _MEMORY_CLASSES.items() if path.startswith(prefix))
    return next(found, memory.INPUTS)


def row_of(
    array: Array, mesh: Mesh, kind: str, layer: str, split: str, layout: str = ""
) -> TensorRow:
    """Returns the row of an argument of a program, whose split is given in words."""
    return TensorRow(
        path=array.path,
        layout=layout,
        shape=list(array.shape),
        dtype=array.dtype,
        split=split,
        bytes=math.prod(array.shape) * array.struct.dtype.itemsize,
        bytes_per_device=bytes_of(array, mesh),
        kind=kind,
        layer=layer,
    )


def _tensor_row(row: sharding_tables.WeightRow, kind: str) -> TensorRow:
    fields: dict[str, Any] = dataclasses.asdict(row) | {"shape": list(row.shape)}
    return TensorRow(**fields, kind=kind, layer=_layer_of(row.path))


def _layer_of(path: str) -> str:
    return scope_name(path.partition("/")[0].rpartition(".")[0])
