"""verify: a Keras model's training step over a mesh, compared with one device in float64."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.keras import model_state
from lingvo_gshard.keras.fitting import layouts_for
from lingvo_gshard.keras.layouts import Layouts, LayoutTable
from lingvo_gshard.keras.step_programs import TRAIN, as_arrays, lower_step
from lingvo_gshard.runtime import Executable, HeldVariable, devices_for
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.verification.causes import describe
from lingvo_gshard.wings.verification.findings import Verification, compare
from lingvo_gshard.wings.verification.function import TOLERANCE
from lingvo_gshard.wings.verification.rules import Evidence
from lingvo_gshard.wings.verification.steps import TensorDifferences, in_float64, judged
from lingvo_gshard.wings.verification.unfolded import unfolded_constants

# The least scale of a tensor, relative to the largest number in a tensor of its part of the state.
# Some gradients are zero but for rounding: the biases of attention's keys have no effect.
_LEAST_SCALE = 1e-3


# (kind, name, value) of a result of a step.
_Row = tuple[str, str, "jax.Array"]


def verify(
    model: Any,
    batch: Any,
    *,
    mesh: Mesh | str | Any | None = None,
    layout: LayoutTable | None = None,
    strategy: str | None = None,
    batch_axes: Sequence[str] | str | None = None,
    partitioner: str = "gspmd",
    tolerance: float = TOLERANCE,
) -> Verification:
    """Checks that a Keras model's training step over a mesh computes what one device computes.

    The step runs twice, over the mesh and on one device, in float64 in place of float32. All logs
    and all variables after the step are compared. The model itself is not changed.

    Args:
      model: compiled, as for `fit`.
      batch: a batch of the dataset: (x, y) or x.
      mesh: as for `fit`.
      layout: as for `fit`, as are `strategy` and `batch_axes`.
      partitioner: "gspmd" or "shardy".
      tolerance: the largest difference that counts as equal, relative to the tensor's scale.

    Returns:
      What was compared, and the first result that differs.

    Raises:
      UserError: as `fit` raises it.
    """
    started = time.monotonic()
    layouts = layouts_for(model, mesh, layout, strategy, batch_axes)
    partitioning = layouts.partitioning
    full = partitioning.mesh
    devices = devices_for(full.size)
    model_state.build(model, batch)
    held = model_state.held_variables(model, layouts)
    ran = []
    for over in (full, full.along(())):
        smaller = dataclasses.replace(partitioning, mesh=over)
        on = dataclasses.replace(layouts, partitioning=smaller)
        ran.append(_run(model, batch, held, on, devices, partitioner))
    (partitioned, executable), (whole, _) = ran
    compared = judged(_differences(partitioned, whole, full), tolerance)
    wrong = next((row for row in compared if not row.is_equal), None)
    return Verification(
        subject=model.name,
        mesh=str(full),
        strategy=partitioning.strategy.to_text(),
        notes=(f"partitioner: {partitioner}",) if partitioner != "gspmd" else (),
        tolerance=tolerance,
        compared=tuple(compared),
        first=wrong and describe(Evidence(wrong, full), "", executable),
        seconds=time.monotonic() - started,
    )


def _run(
    model: Any,
    batch: Any,
    held: Sequence[HeldVariable],
    layouts: Layouts,
    devices: Sequence[Any],
    partitioner: str,
) -> tuple[list[_Row], Executable]:
    """Returns the results of one step, and the program."""
    mesh = layouts.partitioning.mesh
    devices = devices[: mesh.size]
    step = lower_step(model, TRAIN, batch, held, layouts, partitioner, tracing=unfolded_constants)
    program = dataclasses.replace(in_float64(step.program), donated=())
    on = jax.sharding.Mesh(mesh.arrange(devices), mesh.names)
    variables = {each.array.path: each.variable for each in held}
    values = [*as_arrays(batch), *(variables[path].numpy() for path in step.state_paths)]
    pairs = zip(program.inputs, values, strict=True)
    inputs = [array.put(np.asarray(value, array.dtype), on) for array, value in pairs]
    executable = Executable(program, devices)
    results = executable(*inputs)
    names = [("metric", f"logs[{index}]") for index in range(step.log_size)]
    names += [("new weight", path) for path in step.state_paths]
    return [(*name, value) for name, value in zip(names, results, strict=True)], executable


def _differences(partitioned: list[_Row], whole: list[_Row], mesh: Mesh) -> TensorDifferences:
    """Yields the differences of all results."""
    expected = {name: value for _, name, value in whole}
    largest = _largest_by_part(expected)
    for kind, name, value in partitioned:
        least = _LEAST_SCALE * largest.get(_part(name), 0.0)
        yield kind, name, compare(value, expected[name], mesh, least)


def _part(name: str) -> str:
    return name.partition(".")[0]


def _largest_by_part(values: Mapping[str, jax.Array]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if value.ndim and value.dtype.kind == "f":
            size = float(np.abs(np.asarray(value)).max(initial=0.0))
            found[_part(name)] = max(found.get(_part(name), 0.0), size)
    return found
