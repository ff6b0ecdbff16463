"""Chooses the tensors that a forward pass saves: a minimum cut of its graph and its gradient's.

The backward pass needs some tensors of the forward pass. Each is either saved or recomputed from
other saved tensors. The choice with the least total cost is a minimum cut of the graph as a flow
network (https://en.wikipedia.org/wiki/Max-flow_min-cut_theorem). PyTorch's partitioner of joint
graphs uses the same method.

Costs are in nanoseconds of one CPU core. Accelerators are faster at both in about the same ratio,
so that the same choices are good there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.core.lazy import csgraph, sparse
from lingvo_gshard.wings.repeat import subgraph

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


# Writing a byte to a TensorArray and reading it back; computing one element, cheap or expensive.
_SAVE_BYTE, _CHEAP_ELEMENT, _EXPENSIVE_ELEMENT = 0.5, 0.1, 1.0

_VIEWS = frozenset(
    "BroadcastGradientArgs BroadcastTo Const ExpandDims Fill Identity IdentityN OnesLike Pack "
    "Placeholder PreventGradient Range Rank Reshape Shape Size Squeeze StopGradient "
    "ZerosLike".split()
)
_CHEAP = frozenset(
    "Abs Add AddN AddV2 BiasAdd BitwiseAnd BitwiseOr BitwiseXor Cast ConcatV2 Equal Greater "
    "GreaterEqual Invert LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum "
    "Mul MulNoNan Neg NotEqual OneHot Pad PadV2 Relu RightShift Select SelectV2 Sign Slice Split "
    "SplitV Square StridedSlice Sub Transpose Unpack".split()
)
_EXPENSIVE = frozenset(
    "Div DivNoNan Elu Erf Erfc Exp Expm1 FloorDiv FloorMod Log Log1p Pow RealDiv Reciprocal Rsqrt "
    "Sigmoid Softplus Sqrt Tanh TruncateDiv TruncateMod Xdivy Xlogy".split()
)
# Operations that read the shape of a tensor, which is known without computing it.
_SHAPE_OPERATIONS = frozenset("Rank Shape ShapeN Size".split())
_PRODUCTS = frozenset("BatchMatMulV2 BatchMatMulV3 Einsum MatMul XlaDotV2".split())
_SHARDING = "XlaSharding"


class RematCosts(Protocol):
    """Costs of the tensors and operations of one graph."""

    def save_cost(self, tensor: tf.Tensor) -> float:
        """Returns the cost of saving a tensor; infinite if it must not be saved."""
        ...

    def recompute_cost(self, operation: tf.Operation) -> float | None:
        """Returns the cost of running an operation once more; None if that is forbidden."""
        ...


class TimeCosts:
    """Costs that keep a step fast: products, reductions and collectives are never recomputed.

    Operations on weights alone, other than products, are recomputed. Saving a copy of a weight for
    every iteration of a loop is never worth its memory.

    Args:
      inputs: Operations of the inputs that are available in the forward pass only. An operation
        that depends on none of them, except through their shapes, depends on weights alone.
    """

    def __init__(self, inputs: Collection[tf.Operation]):
        results = (y for operation in inputs for y in operation.outputs)
        self._depends_on_inputs = subgraph.dependents(results, ignoring=_SHAPE_OPERATIONS)

    def save_cost(self, tensor: tf.Tensor) -> float:
        """Returns the cost of writing and reading the tensor's bytes."""
        return _save_cost(tensor)

    def recompute_cost(self, operation: tf.Operation) -> float | None:
        """Returns the cost of computing the operation's elements, None for products."""
        elements = sum(map(_count_elements, operation.outputs))
        if operation.type in _VIEWS or math.isinf(elements):
            return 0.0
        if operation.type in _CHEAP:
            return _CHEAP_ELEMENT * elements
        if operation.type in _EXPENSIVE:
            return _EXPENSIVE_ELEMENT * elements
        if operation.type == _SHARDING:
            is_free = self._is_from_weights(operation) or _repeats_annotation(operation)
            return 0.0 if is_free else None
        return _EXPENSIVE_ELEMENT * elements if self._is_from_weights(operation) else None

    def _is_from_weights(self, operation: tf.Operation) -> bool:
        return operation not in self._depends_on_inputs and operation.type not in _PRODUCTS


class MemoryCosts:
    """Costs of a remat policy: only the inputs and chosen products may be saved.

    Args:
      inputs: Operations of the inputs that are available in the forward pass only.
      products: Results of the products that the policy saves. They are never recomputed.
    """

    def __init__(self, inputs: Collection[tf.Operation], products: Collection[tf.Tensor]):
        self._inputs = set(inputs)
        self._products = {id(tensor) for tensor in products}

    def save_cost(self, tensor: tf.Tensor) -> float:
        """Returns the cost of saving an input or a chosen product; infinite for any other."""
        if tensor.op in self._inputs or id(tensor) in self._products:
            return _save_cost(tensor)
        return math.inf

    def recompute_cost(self, operation: tf.Operation) -> float | None:
        """Returns None for a chosen product, 0 for any other operation."""
        is_saved = any(id(tensor) in self._products for tensor in operation.outputs)
        return None if is_saved else 0.0


def _count_elements(tensor: tf.Tensor) -> float:
    """Returns the number of elements; infinite if a TensorArray cannot hold the tensor."""
    if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.variant, tf.resource, tf.string):
        return math.inf
    return float(math.prod(known_sizes(tensor.shape)))


def _save_cost(tensor: tf.Tensor) -> float:
    return _SAVE_BYTE * _count_elements(tensor) * tensor.dtype.size


def _repeats_annotation(operation: tf.Operation) -> bool:
    """Returns whether an elementwise chain leads from an equal sharding annotation to this one.

    XLA need not move data for such an annotation.
    """
    sharding, shape = operation.get_attr("sharding"), operation.outputs[0].shape
    source = operation.inputs[0].op
    while source.type in _CHEAP | _EXPENSIVE | {"Identity", "IdentityN"}:
        same_shape = [x for x in source.inputs if x.shape == shape]
        if not same_shape:
            return False
        source = same_shape[0].op
    return source.type == _SHARDING and source.get_attr("sharding") == sharding
