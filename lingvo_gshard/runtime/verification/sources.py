"""Walks back from an operation of a traced function to what it is computed from."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.tracing.graph_lines import line_of_operation

# The operation at the end of a manual region.
REGION_END = "XlaSpmdShardToFullShape"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Operations to look at: those of a large layer.
_MOST_OPERATIONS = 2000


def sources(
    operation: tf.Operation, equal: Collection[tf.Operation] = ()
) -> Iterator[tf.Operation]:
    """Yields an operation and those that it is computed from, the nearest first.

    What a call of a tf.function computes is yielded before what the call reads.

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
