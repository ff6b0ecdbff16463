"""The table of rules that name the likely cause of a difference, from what was compared."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from lingvo_gshard.core import jax, tf
from lingvo_gshard.sharding import Mesh, xla
from lingvo_gshard.wings.verification import findings, patterns
from lingvo_gshard.wings.verification.operations import (
    RandomOperation,
    facts_of_region,
    nearest_random_operation,
    rounding,
)
from lingvo_gshard.wings.verification.patterns import Axes, Pair, groups_of, named

# Axes -> all tensors, compared with the devices along these axes alone.
Along: TypeAlias = Callable[[Axes], list[findings.Compared]]

# A factor may differ by this much from a power of a number of devices.
_SAME_FACTOR = 1e-6
# Sums over devices multiply by their number, means divide by it. Sizes of shards under a root
# (1/sqrt(d) of attention, a norm) are wrong by its root.
_POWERS = (1.0, -1.0, 0.5, -0.5)
# Begin the names of operations that TensorFlow or a custom gradient makes for the backward pass.
_BACKWARD = ("gradient_tape/", "gradients/")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The knowledge of a tensor that differs; None or empty where nothing is known."""

    compared: findings.Compared
    mesh: Mesh
    tensor: tf.Tensor | None = None
    equal: Collection[tf.Operation] = ()
    values: tuple[jax.Array, np.ndarray | jax.Array] | None = None
    along: Along | None = None

    @property
    def difference(self) -> findings.TensorDifference:
        """The difference of the tensor."""
        return self.compared.difference

    @functools.cached_property
    def annotation(self) -> findings.Annotation | None:
        """The nearest annotation or manual region."""
        return None if self.tensor is None else findings.nearest_annotation(self.tensor, self.mesh)

    @functools.cached_property
    def random(self) -> RandomOperation | None:
        """The nearest random operation that ignores the keys of the step."""
        return None if self.tensor is None else nearest_random_operation(self.tensor, self.equal)

    @functools.cached_property
    def operations(self) -> list[tf.Operation]:
        """The operations that can be wrong. For a gradient, only the backward pass counts."""
        if self.tensor is None:
            return []
        found = list(findings.sources(self.tensor.op, self.equal))
        backward = [op for op in found if op.name.startswith(_BACKWARD)]
        return backward if self.is_gradient else found

    @functools.cached_property
    def is_gradient(self) -> bool:
        """Whether only the backward pass is wrong: what is compared before it is equal."""
        if self.compared.kind != "result" or self.tensor is None:
            return self.compared.kind == "gradient"
        # Results of a function have no kinds. At least one must be of the forward pass.
        is_backward = any(op.name.startswith(_BACKWARD) for op in findings.sources(self.tensor.op))
        return is_backward and any(not op.name.startswith(_BACKWARD) for op in self.equal)

    @functools.cached_property
    def pair(self) -> Pair | None:
        """The values, if there are enough to show a pattern."""
        if self.values is None or self.difference.shapes:
            return None
        wrong, right = (np.asarray(x, np.float64) for x in self.values)
        if right.size < 2 or not (np.isfinite(wrong).all() and np.isfinite(right).all()):
            return None
        split = findings.split_of_array(self.values[0], self.mesh)
        if not any(split) and self.annotation and self.annotation.shape == right.shape:
            split = self.annotation.split or split
        return Pair.of(wrong, right, split, self.mesh)

    def shows_along(self, axes: Axes, shows: Callable[[findings.Compared], bool]) -> bool:
        """Returns whether the devices along axes alone show something, as far as is known."""
        if self.along is None or self.mesh.along(axes) == self.mesh:
            return True
        own = self.compared.kind, self.compared.name
        row = next((row for row in self.along(axes) if (row.kind, row.name) == own), None)
        return row is not None and shows(row)

    def facts(self, names: Collection[str]) -> str:
        """Returns the end of a sentence: operations of manual regions that can be wrong, or ""."""
        found = facts_of_region(self.operations, names, self.mesh)
        return f". In the manual region, {', and '.join(found)}" if found else ""


class Cause(msgspec.Struct, frozen=True):
    """The likely cause of a difference, and groups of mesh axes that it may come from."""

    text: str
    axes: tuple[Axes, ...] = ()


def likely_cause(evidence: Evidence) -> Cause:
    """Returns what a difference usually comes from, by the first rule that knows it."""
    found = next(filter(None, (rule(evidence) for rule in RULES)))
    cause = Cause(found) if isinstance(found, str) else found
    if not evidence.is_gradient:
        return cause
    text = f"only the backward pass is wrong, the forward pass is equal: {cause.text}"
    return Cause(text, cause.axes)


def _shape(evidence: Evidence) -> str:
    if not evidence.difference.shapes:
        return ""
    partitioned, whole = evidence.difference.shapes
    text = "its shape depends on the number of devices"
    if len(partitioned) != len(whole) or math.prod(partitioned) > math.prod(whole):
        return (
            f"{text}: a manual region returns one part for each device, where a sum over them "
            "(psum) is meant"
        )
    if math.prod(partitioned) < math.prod(whole):
        return f"{text}: a part of it that other devices have is missing, where all_gather is meant"
    return f"{text}: the parts of devices are joined along another dimension than they are cut"


def _not_finite(evidence: Evidence) -> str:
    if evidence.values is None:
        return ""
    wrong, right = (np.asarray(x, np.float64) for x in evidence.values)
    if wrong.shape != right.shape or not (~np.isfinite(wrong) & np.isfinite(right)).any():
        return ""
    return (
        "it is not finite where the whole one is: a device divides by a sum or a number of its own "
        "shard that can be zero, or takes a logarithm or root of a part"
    )


def _hidden_generator(evidence: Evidence) -> str | None:
    return "" if evidence.random and evidence.random.is_stateless else _random(evidence)


def _random(evidence: Evidence) -> str | None:
    return evidence.random and (
        f"{evidence.random}, not from a key of the step, so its numbers depend on the mesh. "
        "Draw with lingvo_gshard.core.random_numbers and a key of self.random_seed"
    )


def _copies(evidence: Evidence) -> str:
    axes = evidence.difference.unequal_copies
    if not axes:
        return ""
    over = " and ".join(axes)
    text, how = f"devices along {over} hold different copies of it", ""
    if evidence.values is not None:
        right = np.asarray(evidence.values[1], np.float64)
        copies = findings.copies_along(evidence.values[0], evidence.mesh, axes)
        how = patterns.joined_copies(copies, right, axes, evidence.mesh)
        text += f", and {how or 'neither their sum, mean nor maximum is the whole'}"
    if how:
        return text
    return (
        f"{text}: each device computes from its own shard what needs a sum over {over} (psum) "
        f"before, or draws its own random numbers{evidence.facts(axes)}"
    )


def _multiple(evidence: Evidence) -> Cause | None:
    factor, mesh = evidence.difference.factor, evidence.mesh
    candidates = [axes for axes in groups_of(mesh) if _power(factor, mesh.parts(axes))]
    if not factor or not candidates:
        return None
    if evidence.along is None:
        # Roots are rare. Only another run could tell that one is meant.
        whole = [g for g in candidates if abs(_power(factor, mesh.parts(g)) or 0) == 1]
        candidates = whole or candidates
    found: list[Axes] = []
    for axes in candidates:
        # With the devices of a smaller group the factor would be smaller.
        is_larger = any(set(each) < set(axes) for each in found)
        if not is_larger and evidence.shows_along(
            axes, lambda row: _is_close(factor, row.difference.factor)
        ):
            found.append(axes)
    if not found:
        return None
    text = _cause_of_factor(factor, found, mesh)
    has_region = any(op.type == xla.LEAVE_REGION for op in evidence.operations)
    made = [op.type for op in evidence.operations if "Backprop" in op.type]
    if evidence.is_gradient and made and not has_region:
        text += f". No manual region computes it, so XLA's partitioner does, in {made[0]}"
    return Cause(text, tuple(found))


def _twice(evidence: Evidence) -> str:
    factor = evidence.difference.factor
    is_twice = factor and _is_close(factor, 2.0)
    return "it is twice the whole one: it is added twice" if is_twice else ""


def _of_pair(pattern: Callable[[Pair], str]) -> Callable[[Evidence], str]:
    """Returns a pattern of the values as a rule."""
    return lambda evidence: pattern(evidence.pair) if evidence.pair else ""


def _one_shard(evidence: Evidence) -> str:
    text = _of_pair(patterns.one_shard_right)(evidence)
    return text and text + evidence.facts(evidence.mesh.names)


def _unknown(evidence: Evidence) -> Cause:
    """Returns the evidence where no rule names a cause."""
    text = "no rule explains the values"
    if evidence.pair:
        text = "the values are no multiple, order, shift or part of the whole ones"
    axes = [(name,) for name, size in evidence.mesh.axes if size > 1]
    found = axes
    if evidence.along and len(axes) > 1:
        found = [each for each in axes if evidence.shows_along(each, lambda row: not row.is_equal)]
        others = [each for each in axes if each not in found]
        text += f". Over {named(found)} alone it differs, too" if found else ""
        text += (
            f"{', but' if found else '. It does'} not over {named(others)} alone" if others else ""
        )
    names = {name for each in found or axes for name in each}
    return Cause(text + evidence.facts(names), tuple(found))


# In this order: the more a rule says, the earlier it is tried. The last one always answers.
RULES: tuple[Callable[[Evidence], str | Cause | None], ...] = (
    _shape,
    _hidden_generator,
    _not_finite,
    _copies,
    _multiple,
    _twice,
    *map(_of_pair, patterns.RULES),
    _random,
    lambda evidence: rounding(evidence.operations, evidence.difference.relative),
    _one_shard,
    _of_pair(patterns.added_again),
    _unknown,
)


def _is_close(factor: float, other: float | None) -> bool:
    """Returns whether two factors are equal but for rounding."""
    return other is not None and math.isclose(factor, other, rel_tol=_SAME_FACTOR)


def _power(factor: float | None, devices: int) -> float | None:
    found = (p for p in _POWERS if _is_close(devices**p, factor))
    return next(found, None)


def _cause_of_factor(factor: float, candidates: Sequence[Axes], mesh: Mesh) -> str:
    """Returns a sentence on the cause of a result that is a multiple of the whole one."""
    times = f"{factor:.3g}" if factor > 1 else f"1/{1 / factor:.3g}"
    how = (
        "is summed where it should be averaged, or summed twice,"
        if factor > 1
        else "is averaged where it should be summed, or a sum is missing,"
    )
    ways = []
    for root in (False, True):
        groups = [g for g in candidates if (abs(_power(factor, mesh.parts(g)) or 1) < 1) == root]
        if groups:
            devices = f"over {named(groups)} ({mesh.parts(groups[0])} devices)"
            ways.append(
                f"is wrong by the root of the number of devices, as by the size of one shard in "
                f"place of the whole size under a root, {devices}"
                if root
                else f"{how} {devices}"
            )
    return f"it is {times} times the whole one: it {', or it '.join(ways)}"
