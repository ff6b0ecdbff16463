"""vectorize: computes a function for all slices of stacked tensors at once.

TensorFlow's pfor replaces each operation of the function by one on stacked tensors (Agarwal 2019,
arXiv 1903.04243). The stacks are split over the mesh by their own letter. The function's own
annotations split each slice. This is the only file that uses TensorFlow's private pfor module.

pfor drops custom gradients. To differentiate, vectorize a function that computes the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import optimization_barrier
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import control_flow_ops, gen_xla_ops, pfor, tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import current_partitioning, use_partitioning
from lingvo_gshard.sharding.strategies import Split

_CALL_ATTRIBUTES = (
    *("call_target_name", "backend_config", "has_side_effect"),
    *("result_dtypes", "result_shapes"),
)
_UNKNOWN = "No pfor vectorization defined"


def vectorize(
    letter: str, function: Callable[..., Sequence[tf.Tensor]], *stacks: tf.Tensor
) -> list[tf.Tensor]:
    """Maps a function over the first dimension of stacked tensors, in one graph.

    Args:
      letter: Letter of the first dimension. Annotations inside the function do not use the mesh
        axes that split it.
      function: Maps slices to tensors.
      *stacks: Tensors with the same first dimension.

    Returns:
      The results, stacked along a new first dimension.

    Raises:
      UserError: pfor cannot vectorize one of the operations. The message names it.
    """
    count = stacks[0].shape[0]
    partitioning = current_partitioning()
    shapes: list[tf.TensorShape] = []

    @tf.autograph.experimental.do_not_convert
    def one(index: tf.Tensor) -> list[tf.Tensor]:
        results = function(*[tf.gather(stack, index) for stack in stacks])
        shapes[:] = [result.shape for result in results]
        return list(results)

    slice_partitioning = partitioning and partitioning.within_stack(letter)
    with _converters(count), use_partitioning(slice_partitioning):
        try:
            results: Any = control_flow_ops.pfor(one, count, fallback_to_while_loop=False)
        except ValueError as error:
            raise _named(error) from None
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape([count, *shape])
    return results


def _named(error: ValueError) -> ValueError:
    """Returns an error that names the layer and the operation, if pfor lacks the operation."""
    _, found, operation = str(error).partition(_UNKNOWN)
    if not found:
        return error
    kind, _, rest = operation.removeprefix(" for ").partition("\n")
    name = rest.partition('"')[2].partition('"')[0]
    return ValueError(
        f"{context.layer_path()}: {name} is an operation {kind.strip()!r}, which cannot be "
        "computed for all stages of a pipeline at once"
    )


@contextlib.contextmanager
def _converters(count: int) -> Iterator[None]:
    """Teaches pfor, inside a `with` block, annotations and other operations that it lacks.

    Args:
      count: number of slices.
    """
    known = pfor._pfor_converter_registry
    before = dict(known)
    known.update(
        XlaSharding=_annotated,
        XlaSpmdFullToShardShape=lambda operation: _entered(operation, count),
        XlaSpmdShardToFullShape=lambda operation: _left(operation, count),
        XlaCustomCallV2=lambda operation: _called(operation, count),
        Bitcast=_bitcast,
        TensorScatterAdd=lambda operation: _scattered(operation, tf.tensor_scatter_nd_add),
        # pfor's own computes shapes in a way that needs TensorFlow's constant folding.
        TensorScatterUpdate=lambda operation: _scattered(operation, tf.tensor_scatter_nd_update),
        XlaOptimizationBarrier=_barrier,
    )
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def _annotated(operation: pfor._PforInput) -> pfor.WrappedTensor:
    stack = operation.stacked_input(0)
    split, mesh = _stacked_split(operation, "sharding", stack.shape.rank)
    return pfor.wrap(xla.tile(stack, split, mesh), True)


def _stacked_split(
    operation: pfor._PforInput, attribute: str, rank: int
) -> tuple[Split, Mesh]:
    """Returns how a stack is split whose slices are split as an operation says, and the mesh.

    Args:
      operation: the operation on a slice.
      attribute: name of its sharding.
      rank: rank of the stack.
    """
    partitioning = current_partitioning()
    sharding: Any = operation.get_attr(attribute)
    split = partitioning and xla.split_of(sharding, rank - 1, partitioning.mesh)
    if partitioning is None or split is None:
        raise UserError(
            f"{context.layer_path()}: {operation.op.name} is annotated with devices, not with axes "
            "of the mesh. That is not possible for all stages of a pipeline at once"
        )
    return (partitioning.reserved_axes, *split), partitioning.mesh


def _entered(operation: pfor._PforInput, count: int) -> pfor.WrappedTensor:
    """Enters a manual region with the slices of this device."""
    operation.stack_inputs([0])
    stack = operation.stacked_input(0)
    stack.set_shape([count, *stack.shape[1:]])
    split, mesh = _stacked_split(operation, "manual_sharding", stack.shape.rank)
    return pfor.wrap(xla.full_to_shard(stack, split, mesh), True)


def _left(operation: pfor._PforInput, count: int) -> pfor.WrappedTensor:
    """Leaves a manual region: stacks the slices of all devices."""
    stack = operation.stacked_input(0)
    split, mesh = _stacked_split(operation, "manual_sharding", stack.shape.rank)
    shape: Any = operation.get_attr("full_shape")
    full = [count, *known_sizes(tf.TensorShape(shape))]
    return pfor.wrap(xla.shard_to_full(stack, split, mesh, full), True)


def _called(operation: pfor._PforInput, count: int) -> list[pfor.WrappedTensor]:
    """Returns the results of a custom call for each slice of this device."""
    partitioning = current_partitioning()
    parts = partitioning.parts(partitioning.reserved_axes) if partitioning else 1
    attributes = {name: operation.get_attr(name) for name in _CALL_ATTRIBUTES}
    calls = [
        gen_xla_ops.xla_custom_call_v2(
            operands=[x.t[i] if x.is_stacked else x.t for x in operation.inputs], **attributes
        )
        for i in range(count // parts)
    ]
    return [pfor.wrap(tf.stack(results), True) for results in zip(*calls, strict=True)]


def _bitcast(operation: pfor._PforInput) -> pfor.WrappedTensor:
    return pfor.wrap(tf.bitcast(operation.stacked_input(0), operation.get_attr("type")), True)


def _scattered(operation: pfor._PforInput, scatter: Callable[..., tf.Tensor]) -> pfor.WrappedTensor:
    """Returns one scatter for all slices, with the slice's number prepended to its indices."""
    operation.stack_inputs([0, 1, 2])
    stack, indices, updates = (operation.stacked_input(i) for i in range(3))
    numbers = tf.reshape(tf.range(tf.shape(indices)[0]), [-1] + [1] * (indices.shape.rank - 1))
    numbers = tf.broadcast_to(numbers, tf.concat([tf.shape(indices)[:-1], [1]], 0))
    index = tf.concat([tf.cast(numbers, indices.dtype), indices], -1)
    return pfor.wrap(scatter(stack, index, updates), True)


def _barrier(operation: pfor._PforInput) -> list[pfor.WrappedTensor]:
    inputs = operation.inputs
    (passed,) = optimization_barrier([x.t for x in inputs])
    return [pfor.wrap(t, x.is_stacked) for t, x in zip(passed, inputs, strict=True)]
