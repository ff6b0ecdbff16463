"""The result of a verification: what was compared, and the first tensor that differs."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import jax, known_sizes, tf
from lingvo_gshard.sharding import Mesh, xla
from lingvo_gshard.wings.tracing.source_lines import line_of_operation
from lingvo_gshard.wings.verification.observation import PROJECTIONS

# The operation at the end of a manual region.
REGION_END = "XlaSpmdShardToFullShape"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Ends a search for sources in a large graph. A large layer has about this number of operations.
_MOST_OPERATIONS = 2000


def sources(
    operation: tf.Operation, equal: Collection[tf.Operation] = ()
) -> Iterator[tf.Operation]:
    """Yields an operation and the operations that it is computed from, the nearest first.

    Operations inside a call of a tf.function come before the inputs of the call. What `equal` ones
    are computed from is left out.
    """
    pending, seen = collections.deque([operation]), {operation}
    while pending and len(seen) < _MOST_OPERATIONS:
        current = pending.popleft()
        yield current
        if current in equal and current is not operation:
            continue
        tensors = [*_results_within(current), *current.inputs]
        for source in tensors:
            if source.op not in seen:
                seen.add(source.op)
                pending.append(source.op)


def nearest_line(tensor: tf.Tensor) -> str:
    """Returns the line of the model that computes a tensor; "" if no line of a model does."""
    lines = map(line_of_operation, sources(tensor.op))
    return next(filter(None, lines), "")


def _results_within(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the results of the function that an operation calls; none if it calls none."""
    if operation.type not in _CALLS:
        return []
    function = operation.graph._get_function(operation.get_attr("f").name)
    return list(function.graph.outputs) if function is not None else []


_KINDS = {
    "XlaSharding": "annotation",
    REGION_END: "end of a manual region",
    "XlaSpmdFullToShardShape": "start of a manual region",
}
# Begins the name scopes of gradients.
_GRADIENT = "gradient_tape/"


class Annotation(msgspec.Struct, frozen=True):
    """The place where the split of a tensor is decided.

    Attributes:
      kind: "annotation", or the start or end of a manual region.
      split: mesh axes of each dimension; None if mesh axes cannot express it.
      scope: name scope of the operation, which starts with its layer.
      source: file and line of the code that annotates.
    """

    kind: str
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...] | None
    scope: str
    source: str

    def __str__(self) -> str:
        split = [
            f"dimension {i} over {', '.join(axes)}"
            for i, axes in enumerate(self.split or ())
            if axes
        ]
        text = "; ".join(split) or ("replicated" if self.split else "split by device")
        return f"{self.kind} of {list(self.shape)}: {text}, at {self.source}"


def nearest_annotation(tensor: tf.Tensor, mesh: Mesh) -> Annotation | None:
    """Returns the nearest annotation among the operations that a tensor is computed from."""
    found = (operation for operation in sources(tensor.op) if operation.type in _KINDS)
    nearest = next(found, None)
    return _describe(nearest, mesh) if nearest is not None else None


def _describe(operation: tf.Operation, mesh: Mesh) -> Annotation:
    sharding = operation.get_attr(
        "sharding" if operation.type == "XlaSharding" else "manual_sharding"
    )
    shape = operation.inputs[0].shape
    if operation.type == REGION_END:
        shape = operation.outputs[0].shape
    return Annotation(
        kind=_KINDS[operation.type],
        shape=tuple(known_sizes(shape)),
        split=xla.split_of(sharding, shape.rank, mesh),
        scope=operation.name.rpartition("/")[0],
        source=line_of_operation(operation) or _source_of_forward(operation) or "an unknown line",
    )


def _source_of_forward(operation: tf.Operation) -> str:
    """Returns the line that annotates the tensor that an annotated gradient belongs to.

    The gradient itself is made by TensorFlow, after all lines of the model.
    """
    scope, _, _ = operation.name.removeprefix(_GRADIENT).rpartition("/")
    shape = operation.outputs[0].shape
    sources = [
        line_of_operation(other)
        for other in operation.graph.get_operations()
        if other.type in _KINDS
        and other.name.startswith(f"{scope}/")
        and shape in (other.inputs[0].shape, other.outputs[0].shape)
    ]
    return next(filter(None, sources), "")


# A multiple that the partitioned result may be of the whole one, to this precision.
_SAME_FACTOR = 1e-3
# Rounding of a float64 weight when an update is added, relative to the weight.
_ROUNDING = 2.0**-51


class TensorDifference(msgspec.Struct, frozen=True):
    """The difference between a partitioned tensor and the whole one.

    Attributes:
      relative: largest difference of two elements, relative to the scale of the whole tensor.
      index: the element that differs most; empty for a scalar or a tensor inside of a loop.
      partitioned: its value in the partitioned computation.
      whole: its value in the whole computation.
      factor: the number that the whole tensor times it equals the partitioned one, if there is one.
      unequal_copies: mesh axes along which devices hold different copies of the tensor.
      shapes: the shape over the mesh and the shape on one device if they are unequal, else empty.
    """

    relative: float
    index: tuple[int, ...] = ()
    partitioned: float = 0.0
    whole: float = 0.0
    factor: float | None = None
    unequal_copies: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


def compare(
    partitioned: np.ndarray | jax.Array,
    whole: np.ndarray | jax.Array,
    mesh: Mesh,
    least_scale: float = 0.0,
) -> TensorDifference:
    """Compares two tensors. Those of two shapes differ infinitely.

    The difference is relative to the largest number, or to `least_scale` if this is larger, for
    gradients that are zero but for rounding.
    """
    if partitioned.shape != whole.shape:
        shapes = tuple(partitioned.shape), tuple(whole.shape)
        return TensorDifference(relative=math.inf, shapes=shapes)
    unequal = _unequal_copies(partitioned, mesh)
    p, w = (np.asarray(x, np.float64) for x in (partitioned, whole))
    scale = max(float(np.abs(w).max(initial=0.0)), least_scale)
    apart = np.abs(p - w)
    apart = np.where(np.isnan(apart) & (np.isnan(p) == np.isnan(w)), 0.0, apart)
    index = np.unravel_index(int(np.argmax(apart)), apart.shape) if apart.size else ()
    worst = max(float(apart[index]), _spread(partitioned) if unequal else 0.0)
    return TensorDifference(
        relative=_ratio(worst, scale),
        index=tuple(map(int, index)),
        partitioned=float(p[index]),
        whole=float(w[index]),
        factor=_factor(p, w),
        unequal_copies=unequal,
    )


def compare_update(
    partitioned: jax.Array, whole: jax.Array, before: np.ndarray, mesh: Mesh
) -> TensorDifference:
    """Compares the values of a weight after a step, relative to how far the step moved it."""
    found = compare(partitioned, whole, mesh)
    old, new = np.asarray(before, np.float64), np.asarray(whole, np.float64)
    moved = float(np.abs(new - old).max(initial=0.0))
    largest = float(np.abs(new).max(initial=0.0))
    apart = abs(found.partitioned - found.whole)
    if found.unequal_copies:
        apart = max(apart, _spread(partitioned))
    relative = _ratio(max(apart - _ROUNDING * largest, 0.0), max(moved, _ROUNDING * largest))
    return msgspec.structs.replace(found, relative=relative)


def compare_digests(partitioned: np.ndarray, whole: np.ndarray) -> TensorDifference:
    """Compares two digests of `Observation`: estimates the difference of the tensors by norm."""
    apart = float(np.sqrt(np.mean(np.square(partitioned - whole)[:PROJECTIONS])))
    scales = np.sqrt(np.abs([partitioned[PROJECTIONS], whole[PROJECTIONS]]))
    # Tensors of another norm differ, even if all projections agree.
    apart = max(apart, float(abs(scales[0] - scales[1])))
    return TensorDifference(
        relative=_ratio(apart, float(scales[1])),
        partitioned=float(scales[0]),
        whole=float(scales[1]),
        factor=_factor(partitioned[:PROJECTIONS], whole[:PROJECTIONS]),
    )


def _ratio(apart: float, scale: float) -> float:
    if math.isnan(apart):
        return math.inf
    return apart / scale if scale else (math.inf if apart else 0.0)


def _factor(partitioned: np.ndarray, whole: np.ndarray) -> float | None:
    """Returns c if partitioned = c * whole, and c is not 1."""
    square = float(np.sum(whole * whole))
    if not square or not np.isfinite(partitioned).all():
        return None
    factor = float(np.sum(partitioned * whole)) / square
    rest = float(np.abs(partitioned - factor * whole).max(initial=0.0))
    largest = float(np.abs(partitioned).max(initial=0.0))
    is_multiple = rest <= _SAME_FACTOR * largest and abs(factor - 1) > _SAME_FACTOR
    return factor if is_multiple else None


def _copies(array: np.ndarray | jax.Array) -> dict[str, list[jax.Shard]]:
    """Returns the shards of an array by their place in it."""
    found: dict[str, list[jax.Shard]] = {}
    for shard in getattr(array, "addressable_shards", ()):
        found.setdefault(str(shard.index), []).append(shard)
    return found


def _spread(array: np.ndarray | jax.Array) -> float:
    """Returns the largest difference between two copies of an element."""
    spreads = [
        float(np.ptp(np.stack([np.asarray(s.data, np.float64) for s in copies]), axis=0).max())
        for copies in _copies(array).values()
        if np.asarray(copies[0].data).size
    ]
    return max(spreads, default=0.0)


def _unequal_copies(array: np.ndarray | jax.Array, mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which devices hold different copies of an array."""
    axes: set[str] = set()
    for first, *others in _copies(array).values():
        place = _place(first, mesh, array)
        for other in others:
            if not np.array_equal(np.asarray(first.data), np.asarray(other.data), equal_nan=True):
                pairs = zip(place, _place(other, mesh, array), mesh.names, strict=True)
                differing = [name for mine, its, name in pairs if mine != its]
                # Devices that are neighbors along one axis tell which axis it is.
                axes.update(differing if len(differing) == 1 else ())
    return tuple(name for name in mesh.names if name in axes)


def copies_along(
    array: np.ndarray | jax.Array, mesh: Mesh, axes: Collection[str]
) -> list[tuple[np.ndarray, tuple[slice, ...]]]:
    """Returns copies [devices, ...] of each shard along mesh axes, and its place in the array."""
    found = []
    for copies in _copies(array).values():
        by_place = {_place(shard, mesh, array): shard for shard in copies}
        first = min(by_place)
        rows = [
            np.asarray(by_place[place].data, np.float64)
            for place in sorted(by_place)
            if all(
                mine == its or name in axes
                for mine, its, name in zip(place, first, mesh.names, strict=True)
            )
        ]
        found.append((np.stack(rows), copies[0].index))
    return found


def split_of_array(array: np.ndarray | jax.Array, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split each dimension of an array."""
    places = {
        _place(shard, mesh, array): [each.start or 0 for each in shard.index]
        for shard in getattr(array, "addressable_shards", ())
    }
    origin = (0,) * len(mesh.names)
    split: list[list[tuple[int, str]]] = [[] for _ in array.shape]
    for axis, name in enumerate(mesh.names):
        next_place = tuple(int(i == axis) for i in range(len(origin)))
        starts = places.get(next_place, ()) if mesh.shape[axis] > 1 else ()
        for dimension, start in enumerate(starts):
            if start:
                split[dimension].append((start, name))
    return tuple(tuple(name for _, name in sorted(axes, reverse=True)) for axes in split)


def _place(shard: jax.Shard, mesh: Mesh, array: Any) -> tuple[int, ...]:
    """Returns the place of a shard's device in the mesh."""
    devices = list(array.sharding.mesh.devices.flat) if hasattr(array.sharding, "mesh") else None
    position = devices.index(shard.device) if devices else shard.device.id
    return tuple(int(i) for i in np.unravel_index(position, mesh.shape))


# Kinds of compared tensors, in the order of their computation.
KINDS = (
    "output",
    "loss",
    "metric",
    "gradient",
    "new weight",
    "average",
    "counter",
    "outer weight",
    "result",
)


class Compared(msgspec.Struct, frozen=True):
    """A tensor, by the path of its layer or its name, that was computed partitioned and whole."""

    kind: str
    name: str
    difference: TensorDifference
    is_equal: bool


class NearCollective(msgspec.Struct, frozen=True):
    """A collective over mesh axes that the partitioner compiled for the operation `op_name`.

    `bytes` is the size of its operand or result on one device.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    op_name: str

    def __str__(self) -> str:
        axes = ", ".join(self.axes) or "all devices"
        return f"{self.kind} over {axes} of {self.bytes:,} bytes, for {self.op_name}"


class Finding(msgspec.Struct, frozen=True):
    """The first tensor that differs, with what is near it.

    Attributes:
      layer: path of the layer that computes it; empty at the root.
      likely: the likely cause, in a sentence; empty if nothing points to one.
      annotation: the nearest annotation or manual region.
      collectives: the collectives of the layer in the tensor's phase.
      source: the line that computes it; empty if it is unknown.
      axes: groups of mesh axes. The difference comes from one of these groups; empty if unknown.
    """

    kind: str
    name: str
    layer: str
    difference: TensorDifference
    likely: str
    annotation: Annotation | None
    collectives: tuple[NearCollective, ...]
    source: str = ""
    axes: tuple[tuple[str, ...], ...] = ()

    def lines(self) -> list[str]:
        """Returns the finding for a person, line by line."""
        d = self.difference
        begin = f"The first tensor that differs is the {self.kind} {self.name}"
        if d.shapes:
            partitioned, whole = map(list, d.shapes)
            lines = [f"{begin}: its shape is {partitioned} partitioned, and {whole} whole"]
        else:
            at = f" at {list(d.index)}" if d.index else ""
            values = f"partitioned {d.partitioned:.6g}, whole {d.whole:.6g}{at}"
            lines = [f"{begin}, by {d.relative:.1e}:", f"  {values}"]
        if self.source:
            lines.append(f"  computed at {self.source}")
        if self.likely:
            lines.append(f"  likely: {self.likely}")
        if self.annotation:
            lines.append(f"  nearest annotation: {self.annotation}")
        where = f"for {self.layer or 'this layer'}"
        if not self.collectives:
            lines.append(f"  nearest collective: none was compiled {where}")
        lines += [f"  nearest collective: {each}" for each in self.collectives]
        return lines


class Verification(msgspec.Struct, frozen=True):
    """The comparison of a partitioned computation with the whole one.

    Attributes:
      subject: name of the experiment or function.
      notes: what was changed before the comparison, such as sizes.
      tolerance: the largest difference that counts as equal.
      compared: all compared tensors, in the order of their computation.
      first: the first tensor that differs; None if all are equal.
      not_verified: what the step computes and the comparison leaves out, and why.
    """

    subject: str
    mesh: str
    strategy: str
    notes: tuple[str, ...]
    tolerance: float
    compared: tuple[Compared, ...]
    first: Finding | None
    seconds: float
    not_verified: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all tensors are equal within the tolerance."""
        return self.first is None

    @property
    def largest(self) -> Compared:
        """The tensor with the largest difference."""
        return max(self.compared, key=lambda each: each.difference.relative)

    def lines(self) -> list[str]:
        """Returns the result for a person, line by line."""
        lines = [f"{self.subject} on {self.mesh}, partitioned and whole:", *self.notes]
        lines += [f"not verified: {each}" for each in self.not_verified]
        for kind in KINDS:
            rows = [each for each in self.compared if each.kind == kind]
            if rows:
                worst = max(rows, key=lambda each: each.difference.relative)
                wrong = sum(not each.is_equal for each in rows)
                differ = f"; {wrong} differ" if wrong else ""
                plural = "" if len(rows) == 1 else "es" if kind.endswith("s") else "s"
                lines.append(
                    f"  {len(rows)} {kind}{plural}: largest difference "
                    f"{worst.difference.relative:.1e}, in {worst.name}{differ}"
                )
        if self.first is None:
            return [*lines, f"equal to {self.largest.difference.relative:.0e}"]
        return [*lines, *self.first.lines()]
