"""Finds the annotation or manual region that is nearest to a tensor of a traced function."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator

import msgspec

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.core.tracing.source_lines import line_of_operation
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh

# The operation at the end of a manual region.
REGION_END = "XlaSpmdShardToFullShape"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Ends a search for sources in a large graph. A large layer has about this number of operations.
_MOST_OPERATIONS = 2000


def sources(
    operation: tf.Operation, equal: Collection[tf.Operation] = ()
) -> Iterator[tf.Operation]:
    """Yields an operation and the operations that it is computed from, the nearest first.

    Operations inside a call of a tf.function come before the inputs of the call.

    Args:
      operation: an operation of a traced graph.
      equal: operations whose inputs are not looked at.
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
_ATTRIBUTES = {"XlaSharding": "sharding"}
# Begins the name scopes of gradients.
_GRADIENT = "gradient_tape/"


class Annotation(msgspec.Struct, frozen=True):
    """The place where the split of a tensor is decided.

    Attributes:
      kind: "annotation", or the start or end of a manual region.
      shape: shape of the annotated tensor.
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
    """Returns the annotation with the fewest operations between it and the tensor.

    Only operations that the tensor is computed from are looked at.

    Args:
      tensor: tensor of a traced graph.
      mesh: the mesh of the annotations.
    """
    found = (operation for operation in sources(tensor.op) if operation.type in _KINDS)
    nearest = next(found, None)
    return _describe(nearest, mesh) if nearest is not None else None


def _describe(operation: tf.Operation, mesh: Mesh) -> Annotation:
    sharding = operation.get_attr(_ATTRIBUTES.get(operation.type, "manual_sharding"))
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
