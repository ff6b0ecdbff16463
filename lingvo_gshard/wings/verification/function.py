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

from lingvo_gshard.core import Device, UserError, context, names, tf
from lingvo_gshard.runtime import Executable, devices_for
from lingvo_gshard.sharding import HARDWARE, Mesh, Partitioning, interpreted
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.verification import steps
from lingvo_gshard.wings.verification.causes import find_first
from lingvo_gshard.wings.verification.findings import Compared, Verification, compare
from lingvo_gshard.wings.verification.observation import Observation, Observed
from lingvo_gshard.wings.verification.unfolded import unfolded_constants

TOLERANCE = 1e-9


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
      function: as in `partition`, as are `layouts` and `overrides`.
      arguments: nested structures of arrays, one for each argument.
      mesh: axes and sizes, such as "data=4,model=2".
      strategy: maps letters to axes.
      tolerance: the largest relative difference that counts as equal.
      kernels: "tpu" or "cuda": the function uses the kernels of this platform, computed step by
        step. By default it uses none.

    Raises:
      UserError: an axis, letter or strategy is unknown, or a layout does not fit an argument.
    """
    started = time.monotonic()
    if kernels not in ("", *HARDWARE):
        raise UserError(f"`kernels={kernels}` is unknown. {names.nearest(kernels, HARDWARE)}")
    partitioning = Partitioning.make(mesh, strategy, overrides).on(interpreted(kernels))
    full = partitioning.mesh

    def run(over: Mesh) -> steps.ObservedStep:
        smaller = dataclasses.replace(partitioning, mesh=over)
        devices = devices_for(full.size)[: over.size]
        return _run(function, arguments, smaller, devices, layouts, partitioner)

    partitioned, whole = run(full), run(full.along(()))
    compared = _compare(partitioned, whole, full, tolerance)
    layers = [each.layer for each, _ in partitioned.outputs]

    def along(axes: tuple[str, ...]) -> list[Compared]:
        return _compare(run(full.along(axes)), whole, full.along(axes), tolerance)

    return Verification(
        subject=getattr(function, "__name__", "function").strip("<>"),
        mesh=str(full),
        strategy=partitioning.strategy.to_text(),
        notes=steps.notes(partitioned, whole),
        tolerance=tolerance,
        compared=tuple(compared),
        first=find_first(compared, partitioned, whole, layers, full, along),
        seconds=time.monotonic() - started,
    )


def _compare(
    partitioned: steps.ObservedStep, whole: steps.ObservedStep, mesh: Mesh, tolerance: float
) -> list[Compared]:
    """Returns the comparisons of all results; results of layers come first."""
    rows = [*steps.output_differences(partitioned, whole, mesh)]
    for name, (_, value) in partitioned.results.items():
        rows.append(("result", name, compare(value, whole.results[name][1], mesh)))
    return steps.judged(rows, tolerance)


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    partitioning: Partitioning,
    devices: Sequence[Device],
    layouts: Sequence[Any] | None,
    partitioner: str,
) -> steps.ObservedStep:
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
        tracing=unfolded_constants,
        platform=partitioning.platform,
    )
    program = steps.in_float64(wrapped.lower(*arguments))
    executable = Executable(program, devices)
    values = iter(steps.run_on_arrays(executable, tf.nest.flatten(list(arguments)), devices))
    outputs = [(each, next(values)) for each in observed]
    pairs = zip(results, values, strict=True)
    found = {f"result[{index}]": pair for index, pair in enumerate(pairs)}
    return steps.ObservedStep(executable, outputs, results=found)
