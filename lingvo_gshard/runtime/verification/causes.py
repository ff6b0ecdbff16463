"""Names the likely cause of a difference, from its pattern and from what is near the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from lingvo_gshard import hlo
from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.tracing.source_lines import line_of_operation
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.verification.findings import (
    REGION_END,
    Annotation,
    Compared,
    Finding,
    NearCollective,
    TensorDifference,
    nearest_annotation,
    nearest_line,
    sources,
)
from lingvo_gshard.runtime.verification.steps import ObservedStep
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.training.step.trainer import Trainer

# A factor may differ by this much from a number of devices.
_SAME_FACTOR = 1e-2
_MOST_COLLECTIVES = 3
# Gradients are made by TensorFlow, after all lines of the model.
_WITH_LINES = ("output", "result")
_PHASES = {"gradient": ("backward", "rematerialized"), "new weight": ("optimizer",)}


def find_first(
    compared: Sequence[Compared], step: ObservedStep, trainer: Trainer, mesh: Mesh
) -> Finding | None:
    """Returns the first tensor that differs; None if all are equal.

    The backward pass goes from the loss to the input. The first wrong gradient is therefore in the
    layer whose output is computed last.

    Args:
      compared: all tensors, in the order of their computation. Gradients are in any order.
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
    equal = {each.name for each in compared if each.is_equal and each.kind == "output"}
    equal_operations = {each.tensor.op for name, each in observed.items() if name in equal}
    if first.kind == "output":
        tensor, layer = observed[first.name].tensor, observed[first.name].layer
    elif first.kind == "gradient":
        tensor, layer = step.gradients[first.name][0], _layer_of(first.name)
    else:
        tensor, layer = None, _layer_of(first.name.partition(".")[2])
        layer = layer if first.kind == "new weight" else ""
    layers = trainer.task.layer_paths()
    return describe(first, tensor, layer, step.executable, layers, mesh, equal_operations)


def describe(
    first: Compared,
    tensor: tf.Tensor | None,
    layer: str,
    executable: Executable,
    layers: Sequence[str],
    mesh: Mesh,
    equal: Collection[tf.Operation] = (),
) -> Finding:
    """Returns a finding with the annotation and the collectives that are near a tensor.

    Args:
      first: the tensor, compared.
      tensor: the traced tensor; None if it is not known.
      layer: path of the layer that computes it.
      executable: the partitioned program.
      layers: paths of all layers.
      mesh: the mesh.
      equal: operations whose results are equal.
    """
    annotation = nearest_annotation(tensor, mesh) if tensor is not None else None
    calls = executable.collectives(map(scope_name, layers)) if layers else executable.collectives()
    phases = _PHASES.get(first.kind, ("forward",))
    near = tuple(_near(calls, layer, phases))
    random = nearest_random_operation(tensor, equal) if tensor is not None else None
    source = nearest_line(tensor) if tensor is not None and first.kind in _WITH_LINES else ""
    difference = first.difference
    likely, axes = _likely_cause(difference, annotation, near, mesh, random)
    return Finding(
        kind=first.kind,
        name=first.name,
        layer=layer,
        difference=difference,
        likely=likely,
        annotation=annotation,
        collectives=near,
        source=source,
        axes=axes,
    )


def _likely_cause(
    difference: TensorDifference,
    annotation: Annotation | None,
    collectives: Sequence[NearCollective],
    mesh: Mesh,
    random: RandomOperation | None,
) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Returns what such a difference usually comes from.

    Args:
      difference: how the tensor differs.
      annotation: the nearest annotation or manual region.
      collectives: collectives of its layer.
      mesh: the mesh.
      random: the nearest random operation that ignores the keys of the step.

    Returns:
      a sentence on the cause, empty if nothing is known; and the groups of mesh axes that it can
      come from, if the difference is a factor of their number of devices.
    """
    evident = _evident_cause(difference, random)
    if evident:
        return evident, ()
    factor = difference.factor
    candidates = _axes_of_factor(factor, mesh)
    if factor and candidates:
        return _cause_of_factor(factor, candidates, mesh), tuple(candidates)
    return _other_cause(difference, annotation, collectives, random), ()


def _evident_cause(difference: TensorDifference, random: RandomOperation | None) -> str:
    """Returns the cause of a difference whatever its factor; empty if that does not tell."""
    if difference.shapes:
        return (
            "its shape depends on the number of devices: a manual region returns one part for each "
            "device, where a sum over them (psum) is meant"
        )
    if random and not random.is_stateless:
        return _cause_of_random(random)
    if difference.unequal_copies:
        axes = " and ".join(difference.unequal_copies)
        return (
            f"devices along {axes} hold different copies of it: a sum over {axes} (psum) is "
            "missing, or each device drew its own random numbers"
        )
    return ""


def _other_cause(
    difference: TensorDifference,
    annotation: Annotation | None,
    collectives: Sequence[NearCollective],
    random: RandomOperation | None,
) -> str:
    """Returns the cause of a difference that no number of devices explains; empty if unknown."""
    factor = difference.factor
    if factor and math.isclose(factor, 2, rel_tol=_SAME_FACTOR):
        return "it is twice the whole one: it is added twice"
    if random:
        return _cause_of_random(random)
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


def _axes_of_factor(factor: float | None, mesh: Mesh) -> list[tuple[str, ...]]:
    """Returns the groups of mesh axes whose number of devices a factor is, or its inverse."""
    names = [name for name, size in mesh.axes if size > 1]
    groups = [g for count in range(len(names)) for g in itertools.combinations(names, count + 1)]
    return [axes for axes in groups if factor and _is_of_devices(factor, mesh.parts(axes))]


def _cause_of_factor(factor: float, candidates: Sequence[tuple[str, ...]], mesh: Mesh) -> str:
    """Returns a sentence on the cause of a result that is a multiple of the whole one.

    Args:
      factor: the multiple.
      candidates: the groups of mesh axes that it can come from, each of as many devices.
      mesh: the mesh.
    """
    how = (
        "is summed where it should be averaged, or summed twice,"
        if factor > 1
        else "is averaged where it should be summed, or a sum is missing,"
    )
    times = f"{factor:.3g}" if factor > 1 else f"1/{1 / factor:.3g}"
    axes = " or ".join(" and ".join(group) for group in candidates)
    devices = mesh.parts(candidates[0])
    return f"it is {times} times the whole one: it {how} over {axes} ({devices} devices)"


def narrowed(
    first: Finding, mesh: Mesh, factor_along: Callable[[tuple[str, ...]], float | None]
) -> Finding:
    """Returns a finding whose cause names only the axes that the factor comes from.

    A factor alone does not distinguish mesh axes of equal size. The computation therefore runs
    again for each candidate, on devices along the axes of that candidate only.

    Args:
      first: the finding.
      mesh: the mesh.
      factor_along: returns the factor over the devices along some axes.
    """
    if len(first.axes) < 2 or first.difference.factor is None:
        return first
    found = tuple(
        axes for axes in first.axes if _axes_of_factor(factor_along(axes), mesh.along(axes))
    )
    axes = found or first.axes
    likely = _cause_of_factor(first.difference.factor, axes, mesh)
    return msgspec.structs.replace(first, likely=likely, axes=axes)


def _is_of_devices(factor: float, devices: int) -> bool:
    return any(math.isclose(factor, n, rel_tol=_SAME_FACTOR) for n in (devices, 1 / devices))


def _cause_of_random(random: RandomOperation) -> str:
    return (
        f"{random}, not from a key of the step, so its numbers depend on the mesh. "
        "Draw with lingvo_gshard.core.random_numbers and a key of self.random_seed"
    )


def _near(
    calls: Sequence[hlo.CollectiveCall], layer: str, phases: Sequence[str]
) -> list[NearCollective]:
    """Returns the collectives of a layer, or else of the layers within it, in some phases."""
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


# Beginnings of the types of stateful operations, such as RandomUniformInt.
_STATEFUL = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
_STATELESS = ("StatelessMultinomial", "StatelessRandom", "StatelessTruncatedNormal")
# Operations on keys draw no random numbers. The operations that they are computed from may.
_KEYS = ("StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")


class RandomOperation(msgspec.Struct, frozen=True):
    """A random operation that ignores the keys of the step.

    Attributes:
      kind: TensorFlow's type of the operation, such as "RandomUniform".
      is_stateless: whether it draws from a seed of its own; otherwise from a hidden generator.
      source: the line that draws; empty if it is unknown.
    """

    kind: str
    is_stateless: bool
    source: str

    def __str__(self) -> str:
        how = "a fixed seed of its own" if self.is_stateless else "a generator of its own"
        at = f" at {self.source}" if self.source else ""
        return f"{self.kind}{at} draws from {how}"


def nearest_random_operation(
    tensor: tf.Tensor, equal: Collection[tf.Operation] = ()
) -> RandomOperation | None:
    """Returns the nearest random operation without a key that a tensor is computed from.

    A key of the step is computed from one of its inputs. A fixed seed gives equal numbers on all
    meshes, except in a manual region, where each device draws numbers for its own shard.

    Args:
      tensor: tensor of a traced graph.
      equal: operations whose results are equal. The search ends at these operations.
    """
    in_region = False
    for operation in sources(tensor.op, equal):
        in_region |= operation.type == REGION_END
        if operation.type.startswith(_STATEFUL):
            return RandomOperation(operation.type, False, line_of_operation(operation))
        is_stateless = operation.type.startswith(_STATELESS) and operation.type not in _KEYS
        if is_stateless and in_region:
            # After the shape come the seed, or the key and the counter.
            seeds = [x for x in operation.inputs[1:3] if x.dtype.is_integer]
            if not any(each.type == "Placeholder" for x in seeds for each in sources(x.op)):
                return RandomOperation(operation.type, True, line_of_operation(operation))
    return None
