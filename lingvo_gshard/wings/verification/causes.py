"""Names the likely cause of a difference, from its pattern and from what is near the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core import jax, scope_name
from lingvo_gshard.runtime import Executable
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.verification import findings
from lingvo_gshard.wings.verification.rules import Along, Evidence, likely_cause
from lingvo_gshard.wings.verification.steps import ObservedStep

_MOST_COLLECTIVES = 3
# Gradients are made by TensorFlow, after all lines of the model.
_WITH_LINES = ("output", "result")
_PHASES = {"gradient": ("backward", "rematerialized"), "new weight": ("optimizer",)}


def find_first(
    compared: Sequence[findings.Compared],
    step: ObservedStep,
    whole: ObservedStep,
    layers: Sequence[str],
    mesh: Mesh,
    along: Along | None = None,
) -> findings.Finding | None:
    """Returns the first tensor that differs, in order of computation; None if all are equal.

    The backward pass goes from the loss to the input. The first wrong gradient is therefore in the
    layer whose output is computed last.
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
    tensors = {name: each.tensor for name, each in observed.items()}
    tensors |= {name: tensor for name, (tensor, _) in step.results.items()}
    kinds = ("output", "result")
    equal = {tensors[each.name].op for each in compared if each.is_equal and each.kind in kinds}
    if first.kind == "output":
        tensor, layer = observed[first.name].tensor, observed[first.name].layer
    elif first.kind == "gradient":
        tensor, layer = step.gradients[first.name][0], _layer_of(first.name)
    elif first.kind == "result":
        tensor, layer = tensors[first.name], ""
    else:
        tensor, layer = None, _layer_of(first.name.partition(".")[2])
        layer = layer if first.kind == "new weight" else ""
    values = _values(first, step, whole)
    evidence = Evidence(first, mesh, tensor, equal, values, along)
    return describe(evidence, layer, step.executable, layers)


def _values(
    first: findings.Compared, step: ObservedStep, whole: ObservedStep
) -> tuple[jax.Array, np.ndarray | jax.Array] | None:
    """Returns the partitioned and the whole result; None if only digests or numbers are known."""
    for kind, mine, its in (
        ("gradient", step.gradients, whole.gradients),
        ("result", step.results, whole.results),
    ):
        if first.kind == kind:
            return mine[first.name][1], its[first.name][1]
    if first.kind != "output":
        return None
    mine, its = (
        {seen.name: (seen, value) for seen, value in s.outputs if not seen.is_digest}
        for s in (step, whole)
    )
    if first.name not in mine or first.name not in its:
        return None
    seen, value = mine[first.name]
    return value, seen.like(its[first.name][0], np.asarray(its[first.name][1]))


def describe(
    evidence: Evidence, layer: str, executable: Executable, layers: Sequence[str] = ()
) -> findings.Finding:
    """Returns a finding with the annotation and the collectives that are near a tensor."""
    first, tensor = evidence.compared, evidence.tensor
    calls = executable.collectives(map(scope_name, layers)) if layers else executable.collectives()
    phases = _PHASES.get(first.kind, ("forward",))
    cause = likely_cause(evidence)
    return findings.Finding(
        kind=first.kind,
        name=first.name,
        layer=layer,
        difference=first.difference,
        likely=cause.text,
        annotation=evidence.annotation,
        collectives=tuple(_near(calls, layer, phases)),
        source=findings.nearest_line(tensor)
        if tensor is not None and first.kind in _WITH_LINES
        else "",
        axes=cause.axes,
    )


def _near(
    calls: Sequence[hlo.CollectiveCall], layer: str, phases: Sequence[str]
) -> list[findings.NearCollective]:
    """Returns the collectives of a layer, or else of the layers within it, in some phases."""
    scope = scope_name(layer)
    near = [call for call in calls if call.layer == ""][-_MOST_COLLECTIVES:]
    if layer:
        here = [call for call in calls if call.phase in phases]
        own = [call for call in here if call.layer == scope]
        below = [call for call in here if scope and call.layer.startswith(f"{scope}/")]
        near = (own or below)[:_MOST_COLLECTIVES]
    return [findings.NearCollective(c.kind, c.axes, c.bytes, c.op_name) for c in near]


def _layer_of(weight: str) -> str:
    return weight.rpartition(".")[0]
