"""Verifies a function: partitioned as `partition` does it, compared with one device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import jax, tf
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.partition import Partitioned
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.verification.causes import describe
from lingvo_gshard.runtime.verification.comparison import compare
from lingvo_gshard.runtime.verification.float64 import in_float64
from lingvo_gshard.runtime.verification.observation import Observation, Observed
from lingvo_gshard.runtime.verification.report import Compared, Verification
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning

TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class _Ran:
    """What a function computed: results of layers, then its own results."""

    executable: Executable
    observed: list[Observed]
    values: list[jax.Array]


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

    Raises:
      ValueError: an axis, letter or strategy is unknown, or a layout does not fit an argument.
    """
    started = time.monotonic()
    partitioning = Partitioning.make(mesh, strategy, overrides)
    one = Mesh(tuple((name, 1) for name in partitioning.mesh.names))
    devices = devices_for(partitioning.mesh.size)
    partitioned, whole = (
        _run(function, arguments, each, devices[: each.mesh.size], layouts, partitioner)
        for each in (partitioning, dataclasses.replace(partitioning, mesh=one))
    )
    compared, first = [], None
    names = [("output", each.name) for each in partitioned.observed]
    results = len(partitioned.values) - len(names)
    names += [("result", f"result[{index}]") for index in range(results)]
    for index, (kind, name) in enumerate(names):
        found = compare(partitioned.values[index], whole.values[index], partitioning.mesh)
        row = Compared(kind, name, found, found.relative <= tolerance)
        compared.append(row)
        if first is None and not row.is_equal:
            seen = partitioned.observed[index] if index < len(partitioned.observed) else None
            where = (seen.tensor, seen.layer) if seen else (None, "")
            layers = [each.layer for each in partitioned.observed]
            first = describe(row, *where, partitioned.executable, layers, partitioning.mesh)
    return Verification(
        subject=getattr(function, "__name__", "function").strip("<>"),
        mesh=str(partitioning.mesh),
        strategy=partitioning.strategy.to_text(),
        notes=(),
        tolerance=tolerance,
        compared=tuple(compared),
        first=first,
        seconds=time.monotonic() - started,
    )


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    partitioning: Partitioning,
    devices: Sequence[jax.Device],
    layouts: Sequence[Any] | None,
    partitioner: str,
) -> _Ran:
    observed: list[Observed] = []

    def observing(*tensors: Any) -> list[tf.Tensor]:
        observation = Observation(with_loops=False)
        with context.override(on_result=observation.on_result):
            result = function(*tensors)
        observed[:] = observation.whole
        return [*(each.tensor for each in observed), *tf.nest.flatten(result)]

    wrapped = Partitioned(observing, partitioning, devices, layouts, partitioner=partitioner)
    program = in_float64(wrapped.lower(*arguments))
    mesh = jax.sharding.Mesh(partitioning.mesh.arrange(devices), partitioning.mesh.names)
    pairs = zip(program.inputs, tf.nest.flatten(list(arguments)), strict=True)
    inputs = [array.put(np.asarray(value, array.dtype), mesh) for array, value in pairs]
    executable = Executable(program, devices)
    return _Ran(executable, list(observed), list(executable(*inputs)))
