"""What it costs to keep a tensor for the gradient, and to compute an operation once more instead.

In nanoseconds of a CPU's core. Accelerators are faster at both alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import tensorflow as tf

from lingvo_gshard.core.autodiff import graph_parts

# Of moving a byte into a stack and out again; of computing one number, easy or not.
_KEEPING_A_BYTE, _EASY, _HARD = 0.5, 0.1, 1.0

_VIEWS = frozenset(
    "BroadcastGradientArgs BroadcastTo Const ExpandDims Fill Identity IdentityN OnesLike Pack "
    "Placeholder PreventGradient Range Rank Reshape Shape Size Squeeze StopGradient "
    "ZerosLike".split()
)
_EASY_OPERATIONS = frozenset(
    "Abs Add AddN AddV2 BiasAdd BitwiseAnd BitwiseOr BitwiseXor Cast ConcatV2 Equal Greater "
    "GreaterEqual Invert LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum "
    "Mul MulNoNan Neg NotEqual OneHot Pad PadV2 Relu RightShift Select SelectV2 Sign Slice Split "
    "SplitV Square StridedSlice Sub Transpose Unpack".split()
)
_HARD_OPERATIONS = frozenset(
    "Div DivNoNan Elu Erf Erfc Exp Expm1 FloorDiv FloorMod Log Log1p Pow RealDiv Reciprocal Rsqrt "
    "Sigmoid Softplus Sqrt Tanh TruncateDiv TruncateMod Xdivy Xlogy".split()
)
# Operations that read of a tensor what is known before it is computed.
_OF_SHAPES = frozenset("Rank Shape ShapeN Size".split())
_PRODUCTS = frozenset("BatchMatMulV2 BatchMatMulV3 Einsum MatMul XlaDotV2".split())
_SHARDING = "XlaSharding"


class Costs(Protocol):
    """Costs of the tensors and operations of one graph."""

    def keeping(self, tensor: tf.Tensor) -> float:
        """Returns the cost of keeping a tensor; infinite where that must not be."""

    def again(self, operation: tf.Operation) -> float | None:
        """Returns the cost of computing an operation once more; None where that must not be."""


class OfTime:
    """Costs that leave a step its speed: products, sums and collectives are not computed again.

    passing: operations of the inputs that are gone later. What depends on none of them, but for
    their shapes, is computed from weights, if it is no product: those are never worth keeping.
    """

    def __init__(self, passing: Collection[tf.Operation]):
        results = (y for operation in passing for y in operation.outputs)
        self._moving = graph_parts.depending_on(results, but_for=_OF_SHAPES)

    def keeping(self, tensor: tf.Tensor) -> float:
        return _keeping(tensor)

    def again(self, operation: tf.Operation) -> float | None:
        numbers = sum(map(_numbers, operation.outputs))
        if operation.type in _VIEWS or math.isinf(numbers):
            return 0.0
        if operation.type in _EASY_OPERATIONS:
            return _EASY * numbers
        if operation.type in _HARD_OPERATIONS:
            return _HARD * numbers
        if operation.type == _SHARDING:
            return 0.0 if self._is_from_weights(operation) or _is_marked_so(operation) else None
        return _HARD * numbers if self._is_from_weights(operation) else None

    def _is_from_weights(self, operation: tf.Operation) -> bool:
        return operation not in self._moving and operation.type not in _PRODUCTS


class OfMemory:
    """Costs by which only the inputs that pass and certain other tensors are kept.

    passing: operations of those inputs. may_be_kept: results of products, not computed again.
    """

    def __init__(self, passing: Collection[tf.Operation], may_be_kept: Collection[tf.Tensor]):
        self._passing = set(passing)
        self._may_be_kept = {id(tensor) for tensor in may_be_kept}

    def keeping(self, tensor: tf.Tensor) -> float:
        if tensor.op in self._passing or id(tensor) in self._may_be_kept:
            return _keeping(tensor)
        return math.inf

    def again(self, operation: tf.Operation) -> float | None:
        is_kept = any(id(tensor) in self._may_be_kept for tensor in operation.outputs)
        return None if is_kept else 0.0


def _numbers(tensor: tf.Tensor) -> float:
    """How many numbers a tensor has; infinitely many where they cannot be kept in a stack."""
    if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.variant, tf.resource, tf.string):
        return math.inf
    return float(math.prod(tensor.shape.as_list()))


def _keeping(tensor: tf.Tensor) -> float:
    return _KEEPING_A_BYTE * _numbers(tensor) * tensor.dtype.size


def _is_marked_so(operation: tf.Operation) -> bool:
    """Whether what its input is made from, number by number, is marked as it marks."""
    sharding, shape = operation.get_attr("sharding"), operation.outputs[0].shape
    source = operation.inputs[0].op
    while source.type in _EASY_OPERATIONS | _HARD_OPERATIONS | {"Identity", "IdentityN"}:
        alike = [x for x in source.inputs if x.shape == shape]
        if not alike:
            return False
        source = alike[0].op
    return source.type == _SHARDING and source.get_attr("sharding") == sharding
