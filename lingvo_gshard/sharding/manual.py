"""Manual regions: parts of a model that compute on the shards of one device.

Inside a region every tensor is this device's shard, and only the functions of `collectives` move
data between devices. `full_to_shard` enters a region and `shard_to_full` leaves it. `manual` wraps
a function in both:

    def experts(x_ECM, w_EMH):                      # E/n experts on each of n devices
        return tf.einsum("ECM,EMH->ECH", x_ECM, w_EMH)

    h_ECH = manual(experts, ["ECM", "EMH"], "ECH")(x_ECM, theta.w_in)

A split is either a layout or the mesh axes of each dimension, such as `(("data",), (), ())`. A
layout is split as the current partitioning splits activations of this layout. Along mesh axes that
a split does not name, every device has a copy. Without a partitioning, on one device, and in eager
mode all functions are the identity, so that the same code computes on full tensors.

- All shards have the same shape, so every split dimension must divide evenly.
- A region may read only its arguments and constants. Pass other tensors as arguments.
- A shard has no place outside of a region. `stack_of_shards` makes a full tensor of the shards of
  all devices, which a loop can carry, and `own_shard` returns this device's shard of it.
- Layers may be called in a function given to `manual`. Annotations have no effect there, nor in
  its hand-written gradients.
- Regions need the GSPMD partitioner. TensorFlow has no operations for Shardy's manual regions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core import context, known_sizes, tf
from lingvo_gshard.sharding import partitioning, xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split


def manual(
    function: Callable[..., tf.Tensor | Sequence[tf.Tensor]],
    in_splits: Sequence[str | Split],
    out_splits: str | Split | list[str | Split],
) -> Callable[..., tf.Tensor | list[tf.Tensor]]:
    """Returns a function of full tensors that computes `function` on the shards of each device.

    Args:
      function: Maps shards to one shard or several.
      in_splits: The split of each argument.
      out_splits: The split of the result, or a list of splits if there are several results. Along
        mesh axes that a split does not name, the result must be equal on all devices.

    Raises:
      ValueError: When the returned function is called: the number of arguments or results differs,
        `function` reads a tensor that is not an argument, a split dimension does not divide evenly,
        or a letter or axis is unknown.
    """

    def partitioned(*tensors: tf.Tensor) -> tf.Tensor | list[tf.Tensor]:
        _check_count(function, "argument", len(in_splits), len(tensors))
        parts = [full_to_shard(x, split) for split, x in zip(in_splits, tensors, strict=True)]
        with _inside(), _check_reads(function, parts):
            results: Any = function(*parts)
        if not isinstance(out_splits, list):
            return shard_to_full(results, out_splits)
        _check_count(function, "result", len(out_splits), len(results))
        return [shard_to_full(x, split) for split, x in zip(out_splits, results, strict=True)]

    return partitioned


def full_to_shard(tensor: tf.Tensor, split: str | Split) -> tf.Tensor:
    """Enters a manual region: returns this device's shard of a full tensor.

    The gradient of the full tensor sums over the devices that have copies of a shard.

    Args:
      split: A layout, or the mesh axes of each dimension.

    Raises:
      ValueError: A split dimension does not divide evenly, or a letter or axis is unknown.
    """
    tensor = tf.convert_to_tensor(tensor)
    region = _region_in_use()
    if region is None:
        return tensor
    split = resolve(split, tensor.shape.rank)
    for dimension, axes in enumerate(split):
        if known_sizes(tensor.shape)[dimension] % region.parts(axes):
            raise ValueError(
                f"Manual region: dimension {dimension} of {tensor.shape} does not divide into the "
                f"{region.parts(axes)} parts of {', '.join(axes)} in `mesh={region.mesh}`"
            )
    return xla.full_to_shard(tensor, split, region.mesh, region.reserved_axes)


def shard_to_full(part: tf.Tensor, split: str | Split) -> tf.Tensor:
    """Leaves a manual region: returns the full tensor that the shards of all devices make up.

    Args:
      part: This device's shard. Devices along axes that the split does not name have equal shards.
      split: A layout, or the mesh axes of each dimension.

    Raises:
      ValueError: A letter or axis is unknown.
    """
    part = tf.convert_to_tensor(part)
    region = _region_in_use()
    if region is None:
        return part
    split = resolve(split, part.shape.rank)
    sizes = known_sizes(part.shape)
    shape = [size * region.parts(axes) for size, axes in zip(sizes, split, strict=True)]
    return xla.shard_to_full(part, split, region.mesh, shape, region.reserved_axes)


def stack_of_shards(part: tf.Tensor) -> tf.Tensor:
    """Leaves a manual region: returns the shards of all devices, along a new first dimension.

    The new dimension is split over all mesh axes, so that every device keeps its own shard.

    Args:
      part: This device's shard. Devices may have different ones.
    """
    return shard_to_full(part[tf.newaxis], _over_all_axes(part.shape.rank + 1, 0))


def own_shard(stack: tf.Tensor) -> tf.Tensor:
    """Enters a manual region: returns this device's shard of a tensor of `stack_of_shards`."""
    return full_to_shard(stack, _over_all_axes(stack.shape.rank, 0))[0]


def annotate_stack(stacks: tf.Tensor, dimension: int) -> tf.Tensor:
    """Annotates a tensor that consists of tensors of `stack_of_shards`."""
    region = _region_in_use()
    if region is None:
        return stacks
    return xla.tile(stacks, _over_all_axes(stacks.shape.rank, dimension), region.mesh)


def resolve(split: str | Split, rank: int) -> Split:
    """Returns a split as the mesh axes of each dimension.

    It works inside a region, too: `resolve("BLH", 3)[2]` are the axes that split H.

    Args:
      split: A layout, or the mesh axes of each dimension.

    Raises:
      ValueError: The ranks differ, or a letter is unknown.
    """
    if len(split) != rank:
        raise ValueError(f"Manual region: {split} does not split a tensor of rank {rank}")
    region = _region_in_use()
    if region is None:
        return ((),) * rank
    if isinstance(split, str):
        return region.split(split, "activations", context.layer_path())
    return split


def mesh_in_use() -> Mesh | None:
    """Returns the mesh of the manual region or partitioning, or None on one device."""
    region = _region_in_use()
    return region and region.mesh


def _over_all_axes(rank: int, dimension: int) -> Split:
    region = _region_in_use()
    axes = region.mesh.names if region else ()
    return tuple(axes if i == dimension else () for i in range(rank))


def _region_in_use() -> partitioning.Partitioning | None:
    now = partitioning.current_sharding()
    region = now.manual_partitioning or now.partitioning
    if region is None or region.mesh.size == 1 or tf.executing_eagerly():
        return None
    return region


def _inside() -> contextlib.AbstractContextManager[partitioning.Sharding]:
    """Switches annotations off inside a `with` block and tells collectives the mesh."""
    now = partitioning.current_sharding()
    return partitioning.override_sharding(
        partitioning=None, manual_partitioning=now.manual_partitioning or now.partitioning
    )


@contextlib.contextmanager
def _check_reads(function: Callable, parts: Sequence[tf.Tensor]) -> Iterator[None]:
    """Checks that a function called inside a `with` block reads arguments and constants only.

    It may also read products that a remat unit saved when the forward pass ran the same region.
    XLA would use another tensor in full, and nothing would sum its gradient over the devices.
    """
    if _region_in_use() is None:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    inside = graph.get_operations()[before:]
    saved = context.current().saved_products
    known = {part.name for part in (*parts, *(saved.restored if saved else ()))}
    # Pairs of an outer tensor and its inner one. Eager tensors are constants.
    captures = getattr(graph, "captures", [])
    known |= {inner.name for outer, inner in captures if hasattr(outer, "numpy")}
    known |= {tensor.name for op in inside if op.type != "Placeholder" for tensor in op.outputs}
    for op in inside:
        for tensor in op.inputs:
            if tensor.name not in known and not _is_constant(tensor.op):
                raise ValueError(
                    f"manual({_name(function)}): {op.name} computes with {tensor.name}, of shape "
                    f"{tensor.shape}, which is not a shard. Pass it as an argument with a split"
                )


def _is_constant(op: tf.Operation) -> bool:
    """Returns whether an operation is a constant, maybe behind a barrier."""
    is_barrier = op.type == "XlaOptimizationBarrier"
    return op.type == "Const" or (is_barrier and all(x.op.type == "Const" for x in op.inputs))


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _check_count(function: Callable, what: str, expected: int, given: int) -> None:
    if expected != given:
        raise ValueError(f"manual({_name(function)}): {given} {what}s for {expected} splits")
