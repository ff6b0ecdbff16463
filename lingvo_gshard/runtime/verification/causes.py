"""Names the likely cause of a difference, from its pattern and from what is near the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lingvo_gshard import hlo
from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.verification.annotations import Annotation, nearest_annotation
from lingvo_gshard.runtime.verification.comparison import Difference
from lingvo_gshard.runtime.verification.report import Compared, Finding, NearCollective
from lingvo_gshard.runtime.verification.steps import ObservedStep
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.training.trainer import Trainer

# A factor may differ by this much from a number of devices.
_SAME_FACTOR = 1e-2
_MOST_COLLECTIVES = 3
_PHASES = {"gradient": ("backward", "rematerialized"), "new weight": ("optimizer",)}


def find_first(
    compared: Sequence[Compared], step: ObservedStep, trainer: Trainer, mesh: Mesh
) -> Finding | None:
    """Returns the first tensor that differs; None if all are equal.

    A gradient is computed from the loss back to the input. So the first wrong gradient is that of
    the layer whose output is computed last.

    Args:
      compared: all tensors, in the order in which the step computes them, but for gradients.
      step: the partitioned step.
      trainer: the trainer.
      mesh: the mesh of the step.
    """
    wrong = [each for each in compared if not each.is_equal]
    if not wrong:
        return None
    observed = {each.name: each for each, _ in step.outputs}
    first = wrong[0]
    if first.kind == "gradient":
        order = {each.layer: each.order for each in observed.values()}
        gradients = [each for each in wrong if each.kind == "gradient"]
        first = max(gradients, key=lambda each: order.get(_layer_of(each.name), (0, 0, 0)))
    if first.kind == "output":
        tensor, layer = observed[first.name].tensor, observed[first.name].layer
    elif first.kind == "gradient":
        tensor, layer = step.gradients[first.name][0], _layer_of(first.name)
    else:
        tensor, layer = None, _layer_of(first.name.partition(".")[2])
        layer = layer if first.kind == "new weight" else ""
    return describe(first, tensor, layer, step.executable, trainer.task.layer_paths(), mesh)


def describe(
    first: Compared,
    tensor: tf.Tensor | None,
    layer: str,
    executable: Executable,
    layers: Sequence[str],
    mesh: Mesh,
) -> Finding:
    """Returns a finding with the annotation and the collectives that are near a tensor.

    Args:
      first: the tensor, compared.
      tensor: the traced tensor; None if it is not known.
      layer: path of the layer that computes it.
      executable: the partitioned program.
      layers: paths of all layers.
      mesh: the mesh.
    """
    annotation = nearest_annotation(tensor, mesh) if tensor is not None else None
    calls = executable.collectives(map(scope_name, layers)) if layers else executable.collectives()
    phases = _PHASES.get(first.kind, ("forward",))
    near = tuple(_near(calls, layer, phases))
    likely = likely_cause(first.difference, annotation, near, mesh)
    return Finding(first.kind, first.name, layer, first.difference, likely, annotation, near)


def likely_cause(
    difference: Difference,
    annotation: Annotation | None,
    collectives: Sequence[NearCollective],
    mesh: Mesh,
) -> str:
    """Returns a sentence on what such a difference usually comes from; empty if nothing is known.

    Args:
      difference: how the tensor differs.
      annotation: the nearest annotation or manual region.
      collectives: collectives of its layer.
      mesh: the mesh.
    """
    if difference.unequal_copies:
        axes = " and ".join(difference.unequal_copies)
        return (
            f"devices along {axes} hold different copies of it: a sum over {axes} (psum) is "
            "missing, or each device drew its own random numbers"
        )
    factor = difference.factor
    axes = _axes_of_factor(factor, mesh) if factor else ""
    if factor and axes:
        how = (
            "is summed where it should be averaged, or summed twice,"
            if factor > 1
            else ("is averaged where it should be summed, or a sum is missing,")
        )
        times = f"{factor:.3g}" if factor > 1 else f"1/{1 / factor:.3g}"
        return f"it is {times} times the whole one: it {how} over {axes}"
    if factor and math.isclose(factor, 2, rel_tol=_SAME_FACTOR):
        return "it is twice the whole one: it is added twice"
    by_position = (
        "devices compute by their own positions (a mask, a random key) where positions of the "
        "whole tensor are meant"
    )
    if difference.first_is_right:
        axes = " and ".join(difference.first_is_right)
        return f"only the first shard along {axes} is right: {by_position}"
    if annotation and annotation.kind.endswith("manual region"):
        missing = "" if collectives else "a sum over devices is missing, or "
        return f"in the manual region, {missing}{by_position}"
    return ""


def _axes_of_factor(factor: float, mesh: Mesh) -> str:
    """Returns the mesh axes whose number of devices a factor is, or its inverse."""
    names = [name for name, size in mesh.axes if size > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            devices = mesh.parts(axes)
            for expected in (devices, 1 / devices):
                if math.isclose(factor, expected, rel_tol=_SAME_FACTOR):
                    return f"{' and '.join(axes)} ({devices} devices)"
    return ""


def _near(
    calls: Sequence[hlo.CollectiveCall], layer: str, phases: Sequence[str]
) -> list[NearCollective]:
    """Returns the collectives of a layer, or else of what is within it, in some phases."""
    scope = scope_name(layer)
    if not layer:
        return [_described(call) for call in calls if call.layer == ""][-_MOST_COLLECTIVES:]
    here = [call for call in calls if call.phase in phases]
    own = [call for call in here if call.layer == scope]
    below = [call for call in here if scope and call.layer.startswith(f"{scope}/")]
    return [_described(call) for call in (own or below)[:_MOST_COLLECTIVES]]


def _described(call: hlo.CollectiveCall) -> NearCollective:
    return NearCollective(call.kind, call.axes, call.bytes, call.op_name)


def _layer_of(weight: str) -> str:
    return weight.rpartition(".")[0]
