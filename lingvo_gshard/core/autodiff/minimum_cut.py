"""What of a graph to keep for later, so that the rest can be computed again: a minimum cut.

Tensors that something later reads are kept, or computed again from others that are. What that costs
in all is least where the graph, as a network of flows, is narrowest
(https://en.wikipedia.org/wiki/Max-flow_min-cut_theorem).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import tensorflow as tf
from scipy.sparse import csgraph, csr_array

# scipy's flows are int32: the dearest edge, and one that no cut goes through.
_DEAREST, _UNCUT = 2**17, 2**30
_SOURCE, _SINK = 0, 1


def kept_tensors(
    operations: Sequence[tf.Operation],
    inputs: Collection[tf.Operation],
    later: Collection[tf.Operation],
    cost: Callable[[tf.Tensor], float],
    cost_again: Callable[[tf.Operation], float | None],
) -> list[tf.Tensor]:
    """Returns the tensors to keep.

    operations: all that takes part, each after those that it reads. inputs: whose results are there
    before and not later. later: what can only be computed later. cost: of keeping a tensor.
    cost_again: of computing an operation later, too; None where that must not be.
    """
    nodes = {operation: node for node, operation in enumerate(operations, 2)}
    edges: list[tuple[int, int, float]] = []
    tensors: dict[int, tf.Tensor] = {}
    for operation, node in nodes.items():
        if operation in later:
            edges.append((node, _SINK, np.inf))
        else:
            again = None if operation in inputs else cost_again(operation)
            edges.append((_SOURCE, node, np.inf if again is None else again))
    read_by: dict[int, tuple[tf.Tensor, list[int]]] = {}
    for operation, node in nodes.items():
        for tensor in operation.inputs:
            read_by.setdefault(id(tensor), (tensor, []))[1].append(node)
    for tensor, readers in read_by.values():
        if tensor.op not in nodes or tensor.op in later:
            continue
        node = len(nodes) + 2 + len(tensors)
        tensors[node] = tensor
        edges.append((nodes[tensor.op], node, cost(tensor)))
        edges.extend((node, reader, np.inf) for reader in set(readers))
    before = _side_of_source(edges, len(nodes) + 2 + len(tensors))
    return [t for node, t in tensors.items() if before[nodes[t.op]] and not before[node]]


def _side_of_source(edges: list[tuple[int, int, float]], nodes: int) -> np.ndarray:
    """Which nodes are on the source's side of the minimum cut that is nearest to it."""
    tails, heads, costs = (np.array(column) for column in zip(*edges, strict=True))
    finite = costs[np.isfinite(costs)]
    scale = _DEAREST / max(finite.max(initial=0.0), 1.0)
    capacities = np.where(np.isfinite(costs), np.ceil(costs * scale), _UNCUT).astype(np.int32)
    network = csr_array((capacities, (tails, heads)), shape=(nodes, nodes))
    network.eliminate_zeros()
    flow = csgraph.maximum_flow(network, _SOURCE, _SINK).flow
    left = (network - flow) > 0
    reached = csgraph.breadth_first_order(left, _SOURCE, return_predecessors=False)
    before = np.zeros(nodes, bool)
    before[reached] = True
    return before
