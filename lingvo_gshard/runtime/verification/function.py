"""Verifies a function: partitioned as `partition` does it, compared with one device.

In float32, two orders of one sum differ by rounding. That is enough to send a token to another
expert, or to move an activation over the kink of a ReLU. Gradients then differ by a hundredth.
In float64 such cases are a billion times rarer, so a difference means something.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device, jax, tf
from lingvo_gshard.kernels.kernel import HARDWARE, interpreted, uses_in_words
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.partition import Partitioned
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.verification.causes import describe
from lingvo_gshard.runtime.verification.findings import Compared, Finding, Verification, compare
from lingvo_gshard.runtime.verification.observation import (
    Observation,
    Observed,
    uncompared_outputs,
)
from lingvo_gshard.runtime.verification.rules import Along
from lingvo_gshard.runtime.verification.steps import in_float64
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning

TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class _Ran:
    """The results of a function.

    Attributes:
      executable: the compiled function.
      observed: the results of layers.
      values: the values of these.
      tensors: the traced results of the function itself.
      results: the values of these.
    """

    executable: Executable
    observed: list[Observed]
    values: list[jax.Array]
    tensors: list[tf.Tensor]
    results: list[jax.Array]

    def outputs(self) -> dict[str, tuple[Observed, jax.Array]]:
        """Returns each result of a layer with its value, by name."""
        pairs = zip(self.observed, self.values, strict=True)
        return {seen.name: (seen, value) for seen, value in pairs}


def verify_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    mesh: str | Mesh,
    strategy: str = "replicated",
    layouts: Sequence[Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
    tolerance: float = TOLERANCE,
    kernels: str = "",
) -> Verification:
    """Compares a function over a mesh with the same function on one device, in float64.

    Results of layers are compared, too, unless they are computed inside of a compiled loop.

    Args:
      function: as in `partition`.
      arguments: nested structures of arrays, one for each argument.
      mesh: axes and sizes, such as "data=4,model=2".
      strategy: maps letters to axes.
      layouts: as in `partition`.
      overrides: as in `partition`.
      partitioner: "gspmd" or "shardy".
      tolerance: the largest relative difference that counts as equal.
      kernels: "tpu" or "cuda": the function uses the kernels of this platform, computed step by
        step. By default it uses none.

    Raises:
      UserError: an axis, letter or strategy is unknown, or a layout does not fit an argument.
    """
    started = time.monotonic()
    partitioning = Partitioning.make(mesh, strategy, overrides).on(_interpreted(kernels))
    full = partitioning.mesh

    def run(over: Mesh) -> _Ran:
        smaller = dataclasses.replace(partitioning, mesh=over)
        devices = devices_for(full.size)[: over.size]
        return _run(function, arguments, smaller, devices, layouts, partitioner)

    partitioned, whole = run(full), run(full.along(()))
    compared, notes = _compare(partitioned, whole, full, tolerance)
    wrong = next((row for row in compared if not row.is_equal), None)

    def along(axes: tuple[str, ...], kind: str, name: str) -> Compared | None:
        rows, _ = _compare(run(full.along(axes)), whole, full.along(axes), tolerance)
        return next((row for row in rows if (row.kind, row.name) == (kind, name)), None)

    return Verification(
        subject=getattr(function, "__name__", "function").strip("<>"),
        mesh=str(full),
        strategy=partitioning.strategy.to_text(),
        notes=notes,
        tolerance=tolerance,
        compared=tuple(compared),
        first=wrong and _describe(wrong, compared, partitioned, whole, full, along),
        seconds=time.monotonic() - started,
    )


def _interpreted(kernels: str) -> str:
    """Returns the platform that computes the kernels step by step. Raises UserError."""
    if kernels not in ("", *HARDWARE):
        raise UserError(f"`kernels={kernels}` is unknown. {names.nearest(kernels, HARDWARE)}")
    return interpreted(kernels)


def _compare(
    partitioned: _Ran, whole: _Ran, mesh: Mesh, tolerance: float
) -> tuple[list[Compared], tuple[str, ...]]:
    """Returns the comparisons of all results, and notes on outputs that cannot be compared."""
    outputs = [ran.outputs() for ran in (partitioned, whole)]
    rows = [
        ("output", name, compare(value, seen.like(*outputs[1][name]), mesh))
        for name, (seen, value) in outputs[0].items()
        if name in outputs[1] and outputs[1][name][1].shape == value.shape
    ]
    for index, (mine, its) in enumerate(
        zip(*(r.results for r in (partitioned, whole)), strict=True)
    ):
        rows.append(("result", f"result[{index}]", compare(mine, its, mesh)))
    shapes = [{name: value.shape for name, (_, value) in of.items()} for of in outputs]
    compared = [Compared(*row, row[2].relative <= tolerance) for row in rows]
    kernels = uses_in_words(partitioned.executable.program.kernels)
    return compared, (*kernels, *uncompared_outputs(*shapes))


def _describe(
    wrong: Compared,
    compared: Sequence[Compared],
    partitioned: _Ran,
    whole: _Ran,
    mesh: Mesh,
    along: Along,
) -> Finding:
    """Returns the finding of the first row that differs."""
    observed = {each.name: each for each in partitioned.observed}
    results = [row for row in compared if row.kind == "result"]
    tensors = {row.name: x for row, x in zip(results, partitioned.tensors, strict=True)}
    tensors |= {name: each.tensor for name, each in observed.items()}
    equal = {tensors[row.name].op for row in compared if row.is_equal}
    layers = [each.layer for each in partitioned.observed]
    if wrong.kind == "output":
        tensor, layer = observed[wrong.name].tensor, observed[wrong.name].layer
        mine, other = partitioned.outputs()[wrong.name], whole.outputs()[wrong.name]
        values = mine[1], mine[0].like(*other)
    else:
        index, layer = results.index(wrong), ""
        tensor = partitioned.tensors[index]
        values = partitioned.results[index], whole.results[index]
    executable = partitioned.executable
    return describe(wrong, tensor, layer, executable, layers, mesh, equal, values, along)


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    partitioning: Partitioning,
    devices: Sequence[Device],
    layouts: Sequence[Any] | None,
    partitioner: str,
) -> _Ran:
    observed: list[Observed] = []
    results: list[tf.Tensor] = []

    def observing(*tensors: Any) -> list[tf.Tensor]:
        observation = Observation(with_loops=False)
        with context.override(on_result=observation.on_result):
            result = function(*tensors)
        observed[:] = observation.whole
        flat = [x for x in tf.nest.flatten(result) if x is not None]
        results[:] = [tf.convert_to_tensor(x) for x in flat]
        return [*(each.tensor for each in observed), *results]

    wrapped = Partitioned(
        observing,
        partitioning,
        devices,
        layouts,
        partitioner=partitioner,
        folds_constants=False,
        platform=partitioning.platform,
    )
    program = in_float64(wrapped.lower(*arguments))
    mesh = jax.sharding.Mesh(partitioning.mesh.arrange(devices), partitioning.mesh.names)
    pairs = zip(program.inputs, tf.nest.flatten(list(arguments)), strict=True)
    inputs = [array.put(np.asarray(value, array.dtype), mesh) for array, value in pairs]
    executable = Executable(program, devices)
    values, count = list(executable(*inputs)), len(observed)
    return _Ran(executable, list(observed), values[:count], list(results), values[count:])
