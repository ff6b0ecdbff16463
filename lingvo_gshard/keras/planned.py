"""plan: memory, communication and time of a Keras model's training step on any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import SILENT, Progress
from lingvo_gshard.keras import model_state
from lingvo_gshard.keras.fitting import layouts_for
from lingvo_gshard.keras.layouts import LayoutTable
from lingvo_gshard.keras.model_state import METRICS, OPTIMIZER, THETA
from lingvo_gshard.keras.step_programs import TRAIN, StepProgram, lower_step
from lingvo_gshard.runtime import platform_of
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.planning import memory
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.planned_program import PlannedProgram
from lingvo_gshard.wings.planning.planner import plan_program
from lingvo_gshard.wings.planning.programs.planned import parameters_of, tensor_rows

_CLASSES = {THETA: memory.WEIGHTS, OPTIMIZER: memory.MOMENTS, METRICS: memory.INPUTS}


def plan(
    model: Any,
    batch: Any,
    topology: str,
    *,
    mesh: Mesh | str | Any | None = None,
    layout: LayoutTable | None = None,
    strategy: str | None = None,
    batch_axes: Sequence[str] | str | None = None,
    partitioner: str = "gspmd",
    step_tokens: int | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Plans the training step of a compiled Keras model on a machine that need not be here.

    The step is compiled ahead of time by the machine's own compiler, and not run.

    Args:
      model: compiled, as for `fit`.
      batch: a batch of the dataset, or `tf.TensorSpec`s in its structure: (x, y) or x.
      topology: the machine, such as "v5e:4x4".
      mesh: as for `fit`. None: the mesh of the LayoutMap, else data=N over all N devices.
      layout: as for `fit`, as are `strategy` and `batch_axes`.
      partitioner: "gspmd" or "shardy".
      step_tokens: tokens of a batch, for the speed in tokens.

    Raises:
      UserError: as `fit` and `lingvo_gshard.plan` raise it.
    """
    machine = topologies.get(topology)
    if mesh is None and getattr(layout, "device_mesh", None) is None:
        mesh = f"data={machine.devices}"
    layouts = layouts_for(model, mesh, layout, strategy, batch_axes)
    compilation.check_mesh(layouts.partitioning.mesh, machine)
    device = machine.compile_devices()[0]
    partitioning = layouts.partitioning.on(platform_of(device), device.device_kind)
    layouts = dataclasses.replace(layouts, partitioning=partitioning)
    progress.begin("tracing and lowering")
    model_state.build(model, batch)
    held = model_state.held_variables(model, layouts)
    step = lower_step(model, TRAIN, batch, held, layouts, partitioner)
    planned = _planned(model.name, step, step_tokens)
    return plan_program(planned, partitioning, machine, progress=progress)


def _planned(name: str, step: StepProgram, step_tokens: int | None) -> PlannedProgram:
    program = step.program
    classes = [_class_of(array.path) for array in program.inputs]
    tensors = tensor_rows(program, classes, _layer_of)
    return PlannedProgram(
        program=program,
        name=name,
        classes=tuple(classes),
        layers=None,
        tensors=tensors,
        parameters=parameters_of(tensors),
        tokens=step_tokens,
    )


def _class_of(path: str) -> str:
    return _CLASSES.get(path.partition(".")[0], memory.INPUTS)


def _layer_of(path: str) -> str:
    return path.partition(".")[2].rpartition("/")[0]
