"""vectorize: computes a function for all slices of stacked tensors at once.

TensorFlow's pfor replaces each operation of the function by one on stacked tensors (Agarwal 2019,
arXiv 1903.04243). The stacks are split over the mesh by their own letter. The function's own
annotations split each slice. This is the only file that uses TensorFlow's private pfor module.

pfor drops custom gradients. To differentiate, vectorize a function that computes the gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core import UserError, context, known_sizes, optimization_barrier, tf
from lingvo_gshard.core.lazy import control_flow_ops, gen_xla_ops, pfor
from lingvo_gshard.sharding import Mesh, Split, current_partitioning, use_partitioning, xla

_UNKNOWN = "No pfor vectorization defined"


def vectorize(
    letter: str, function: Callable[..., Sequence[tf.Tensor]], *stacks: tf.Tensor
) -> list[tf.Tensor]:
    """Maps a function over the first dimension of stacked tensors, in one graph.

    Args:
      letter: Letter of the first dimension. Annotations inside the function do not use the mesh
        axes that split it.
      *stacks: Tensors with the same first dimension.

    Returns:
      The results, stacked along a new first dimension.

    Raises:
      UserError: pfor cannot vectorize one of the operations. The message names it.
    """
    count = known_sizes(stacks[0].shape)[0]
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
    """Teaches pfor, inside a `with` block, annotations and other operations that it lacks."""
    known = pfor._pfor_converter_registry
    before = dict(known)
    known.update(
        XlaSharding=_annotated,
        XlaCustomCallV2=functools.partial(_called, count=count),
        Bitcast=lambda op: pfor.wrap(tf.bitcast(op.stacked_input(0), op.get_attr("type")), True),
        TensorScatterAdd=lambda operation: _scattered(operation, tf.tensor_scatter_nd_add),
        # pfor's own computes shapes in a way that needs TensorFlow's constant folding.
        TensorScatterUpdate=lambda operation: _scattered(operation, tf.tensor_scatter_nd_update),
        XlaOptimizationBarrier=_barrier,
        XlaVariadicReduceV2=_reduced,
    )
    for kind, converter in list(known.items()):
        known[kind] = functools.partial(_on_slices, converter)
    known.update(
        XlaSpmdFullToShardShape=functools.partial(_entered, count=count),
        XlaSpmdShardToFullShape=functools.partial(_left, count=count),
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


def _stacked_split(operation: pfor._PforInput, attribute: str, rank: int) -> tuple[Split, Mesh]:
    """Returns how a stack is split whose slices are split as an operation says, and the mesh."""
    partitioning = current_partitioning()
    sharding: Any = operation.get_attr(attribute)
    split = partitioning and xla.split_of(sharding, rank - 1, partitioning.mesh)
    if partitioning is None or split is None:
        raise UserError(
            f"{context.layer_path()}: {operation.op.name} is annotated with devices, not with axes "
            "of the mesh. That is not possible for all stages of a pipeline at once"
        )
    return (partitioning.reserved_axes, *split), partitioning.mesh


class _Slices:
    """The slices of this device inside of a manual region, which pfor takes for one stack.

    A device has fewer slices than the stack. pfor gives a stack the shape of all.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self.tensors = list(tensors)
        self.dtype = self.tensors[0].dtype

    def set_shape(self, shape: tf.TensorShape) -> None:
        """Ignores the shape of the whole stack."""

    def wrapped(self) -> pfor.WrappedTensor:
        """Returns the slices as the converter of an operation returns its result."""
        return pfor.WrappedTensor(self, True, False)


def _entered(operation: pfor._PforInput, count: int) -> pfor.WrappedTensor:
    """Enters a manual region with the slices of this device."""
    operation.stack_inputs([0])
    stack = operation.stacked_input(0)
    stack.set_shape([count, *stack.shape[1:]])
    split, mesh = _stacked_split(operation, "manual_sharding", stack.shape.rank)
    own = xla.full_to_shard(stack, split, mesh)
    return _Slices(tf.unstack(own, count // mesh.parts(split[0]))).wrapped()


def _left(operation: pfor._PforInput, count: int) -> pfor.WrappedTensor:
    """Leaves a manual region: stacks the slices of all devices."""
    (wrapped,) = operation.inputs
    own = tf.stack(wrapped.t.tensors)
    split, mesh = _stacked_split(operation, "manual_sharding", own.shape.rank)
    attribute: Any = operation.get_attr("full_shape")
    shape = [count, *known_sizes(tf.TensorShape(attribute))]
    return pfor.wrap(xla.shard_to_full(own, split, mesh, shape), True)


def _on_slices(converter: Callable, operation: pfor._PforInput) -> Any:
    """Converts an operation; inside of a manual region to one operation for each slice."""
    found = [x.t for x in operation.inputs if isinstance(x.t, _Slices)]
    if not found:
        return converter(operation)
    if operation.op.type == "IdentityN":
        # That of a custom gradient has the region's results as well, which are full tensors.
        return operation.inputs
    calls = [_on_slice(operation, index) for index in range(len(found[0].tensors))]
    return [_Slices(results).wrapped() for results in zip(*calls, strict=True)]


def _on_slice(operation: pfor._PforInput, index: int) -> list[tf.Tensor]:
    one = operation.op
    inputs = [x.t.tensors[index] if isinstance(x.t, _Slices) else x.t for x in operation.inputs]
    dtypes = [y.dtype for y in one.outputs]
    return pfor._create_op(one.type, inputs, dtypes, one.node_def.attr).outputs


def _called(operation: pfor._PforInput, count: int) -> list[pfor.WrappedTensor]:
    """Returns the results of a custom call on one device, which has all slices."""
    inputs = [tf.unstack(x.t, count) if x.is_stacked else [x.t] * count for x in operation.inputs]
    of_slices = [_Slices(slices).wrapped() for slices in inputs]
    called = pfor._PforInput(operation.pfor, operation.op, of_slices)
    calls = [_on_slice(called, index) for index in range(count)]
    return [pfor.wrap(tf.stack(results), True) for results in zip(*calls, strict=True)]


def _scattered(operation: pfor._PforInput, scatter: Callable[..., tf.Tensor]) -> pfor.WrappedTensor:
    """Returns one scatter for all slices, with the slice's number prepended to its indices."""
    operation.stack_inputs([0, 1, 2])
    stack, indices, updates = (operation.stacked_input(i) for i in range(3))
    numbers = tf.reshape(tf.range(tf.shape(indices)[0]), [-1] + [1] * (indices.shape.rank - 1))
    numbers = tf.broadcast_to(numbers, tf.concat([tf.shape(indices)[:-1], [1]], 0))
    index = tf.concat([tf.cast(numbers, indices.dtype), indices], -1)
    return pfor.wrap(scatter(stack, index, updates), True)


def _reduced(operation: pfor._PforInput) -> list[pfor.WrappedTensor]:
    """Reduces stacks along the dimensions that follow the one of the stacks."""
    count = len(operation.inputs) // 2
    operation.stack_inputs(list(range(count)))
    dimensions: Any = operation.get_attr("dimensions_to_reduce")
    results: Any = gen_xla_ops.xla_variadic_reduce_v2(
        [operation.stacked_input(i) for i in range(count)],
        [operation.unstacked_input(count + i) for i in range(count)],
        dimensions_to_reduce=[d + 1 for d in dimensions],
        reducer=operation.get_attr("reducer"),
    )
    return [pfor.wrap(result, True) for result in results]


def _barrier(operation: pfor._PforInput) -> list[pfor.WrappedTensor]:
    inputs = operation.inputs
    (passed,) = optimization_barrier([x.t for x in inputs])
    return [pfor.wrap(t, x.is_stacked) for t, x in zip(passed, inputs, strict=True)]
