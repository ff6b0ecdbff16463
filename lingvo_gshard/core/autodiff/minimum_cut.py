"""Chooses which tensors the forward pass saves for the backward pass, by a minimum cut.

The backward pass needs some tensors of the forward pass. Each is either saved or recomputed from
other saved tensors. The choice with the least total cost is a minimum cut of the graph as a flow
network (https://en.wikipedia.org/wiki/Max-flow_min-cut_theorem). PyTorch's partitioner of joint
graphs uses the same method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from lingvo_gshard.core.lazy import csgraph, sparse, tf

# scipy's capacities are int32. Costs are scaled so that the largest finite one is _MAX_COST.
_MAX_COST, _INFINITE = 2**17, 2**30
_SOURCE, _SINK = 0, 1


def tensors_to_save(
    operations: Sequence[tf.Operation],
    inputs: Collection[tf.Operation],
    backward: Collection[tf.Operation],
    save_cost: Callable[[tf.Tensor], float],
    recompute_cost: Callable[[tf.Operation], float | None],
) -> list[tf.Tensor]:
    """Returns the tensors to save, at the least total cost of saving and recomputing.

    Args:
      operations: All operations of the forward and backward pass, in topological order.
      inputs: Operations whose results are available in the forward pass only.
      backward: Operations that can run in the backward pass only.
      save_cost: Returns the cost of saving a tensor.
      recompute_cost: Returns the cost of running an operation once more in the backward pass, or
        None to forbid it.
    """
    nodes = {operation: node for node, operation in enumerate(operations, 2)}
    edges: list[tuple[int, int, float]] = []
    tensors: dict[int, tf.Tensor] = {}
    for operation, node in nodes.items():
        if operation in backward:
            edges.append((node, _SINK, np.inf))
        else:
            cost = None if operation in inputs else recompute_cost(operation)
            edges.append((_SOURCE, node, np.inf if cost is None else cost))
    readers_of: dict[int, tuple[tf.Tensor, list[int]]] = {}
    for operation, node in nodes.items():
        for tensor in operation.inputs:
            readers_of.setdefault(id(tensor), (tensor, []))[1].append(node)
    for tensor, readers in readers_of.values():
        if tensor.op not in nodes or tensor.op in backward:
            continue
        node = len(nodes) + 2 + len(tensors)
        tensors[node] = tensor
        edges.append((nodes[tensor.op], node, save_cost(tensor)))
        edges.extend((node, reader, np.inf) for reader in set(readers))
    in_forward = _source_side(edges, len(nodes) + 2 + len(tensors))
    return [
        tensor
        for node, tensor in tensors.items()
        if in_forward[nodes[tensor.op]] and not in_forward[node]
    ]


def _source_side(edges: list[tuple[int, int, float]], nodes: int) -> np.ndarray:
    """Returns a bool [nodes]: the source's side of the minimum cut that is nearest to the source.

    Args:
      edges: (tail, head, capacity) triples.
      nodes: The number of nodes.
    """
    tails, heads, costs = (np.array(column) for column in zip(*edges, strict=True))
    finite = costs[np.isfinite(costs)]
    scale = _MAX_COST / max(finite.max(initial=0.0), 1.0)
    capacities = np.where(np.isfinite(costs), np.ceil(costs * scale), _INFINITE).astype(np.int32)
    network = sparse.csr_array((capacities, (tails, heads)), shape=(nodes, nodes))
    network.eliminate_zeros()
    flow = csgraph.maximum_flow(network, _SOURCE, _SINK).flow
    residual = (network - flow) > 0
    reached = csgraph.breadth_first_order(residual, _SOURCE, return_predecessors=False)
    is_reached = np.zeros(nodes, bool)
    is_reached[reached] = True
    return is_reached
