"""Converts splits to XLA's OpSharding.

A split lists the mesh axes of each dimension, such as `(("data",), (), ("model",))`. `()` means not
split. TensorFlow writes a split into the graph as an XlaSharding operation, which lowers to
`custom_call @Sharding` in StableHLO. The gradient gets the same annotation as the tensor. This is
the only file that uses TensorFlow's private sharding module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import custom_gradient, known_sizes
from lingvo_gshard.core.lazy import gen_xla_ops, tf, xla_sharding
from lingvo_gshard.sharding import recording
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split


def tiling(split: Split, mesh: Mesh) -> np.ndarray:
    """Returns the partition ids of a split over a mesh, [*shards, copies]."""
    used = [axis for axes in split for axis in axes]
    parts = [mesh.parts(axes) for axes in split]
    order = used + [axis for axis in mesh.names if axis not in used]
    return mesh.ids.transpose([mesh.names.index(axis) for axis in order]).reshape([*parts, -1])


def split_of_tiling(devices: np.ndarray, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split that a tiling describes, or None if mesh axes cannot express it.

    Args:
      devices: Partition ids, [*shards, *copies]. The order of copies has no meaning.
    """
    if devices.size != mesh.size:
        return None
    devices = _sorted_copies(devices, rank)
    axes = [name for name, size in mesh.axes if size > 1]
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            split = _assign_axes(order, devices.shape[:rank], mesh)
            if split and np.array_equal(_sorted_copies(tiling(split, mesh), rank), devices):
                return split
    return None


def _sorted_copies(devices: np.ndarray, rank: int) -> np.ndarray:
    """Returns the same tiling with all copies in one last dimension, sorted."""
    return np.sort(devices.reshape([*devices.shape[:rank], -1]), axis=-1)


def _assign_axes(axes: Sequence[str], parts: Sequence[int], mesh: Mesh) -> Split | None:
    """Returns the split that assigns axes, in order, to dimensions of given numbers of shards.

    Returns None if the sizes of the axes do not match.
    """
    left, split = list(axes), []
    for count in parts:
        taken: list[str] = []
        while left and mesh.parts(taken) < count:
            taken.append(left.pop(0))
        if mesh.parts(taken) != count:
            return None
        split.append(tuple(taken))
    return None if left else tuple(split)


# Types of the operations that `full_to_shard` and `shard_to_full` create.
ENTER_REGION, LEAVE_REGION = "XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape"


def tile(tensor: tf.Tensor, split: Split, mesh: Mesh) -> tf.Tensor:
    """Annotates a tensor and its gradient as split over mesh axes.

    A dimension over several axes is split along the first, then each shard along the next. Devices
    along axes that the split does not name hold copies. In eager mode this is the identity.

    Raises:
      ValueError: The ranks differ, or an axis is unknown or repeated.
    """
    if tensor.shape.rank not in (None, len(split)):
        raise ValueError(
            f"Split {split} has {len(split)} dimensions for a tensor of rank {tensor.shape.rank}"
        )
    recording.note_axes(itertools.chain(*split))
    return _annotate(tensor, _sharding(split, mesh))


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates a tensor as replicated on all devices."""
    return _annotate(tensor, xla_sharding.Sharding.replicate())


def assign(tensor: tf.Tensor, devices: np.ndarray) -> tf.Tensor:
    """Annotates a tensor as split over given devices.

    Args:
      devices: Partition ids [*shards, copies]: for each dimension of the tensor its number of
        shards, and a last dimension of devices that hold copies of a shard. XLA requires every
        device of the program exactly once.
    """
    recording.note_axes((recording.ANY_AXIS,))
    return _annotate(tensor, _from_tiling(devices))


def full_to_shard(
    tensor: tf.Tensor, split: Split, mesh: Mesh, stacked: tuple[str, ...] = ()
) -> tf.Tensor:
    """Enters a manual region: returns this device's shard, which XLA does not partition further.

    The gradient of the full tensor sums over the devices that have copies of a shard.

    Args:
      stacked: Axes along which devices have different slices of a stack, and no copies; see
        `Partitioning.reserved_axes`.
    """

    recording.note_axes(itertools.chain(*split, stacked))

    @custom_gradient
    def part_of(full: tf.Tensor):
        def gradient(d_part: tf.Tensor) -> tf.Tensor:
            return _sum_of_copies(d_part, split, mesh, known_sizes(full.shape), stacked)

        return xla_sharding.auto_to_manual_spmd_partition(full, op_sharding(split, mesh)), gradient

    return part_of(tensor)


def shard_to_full(
    part: tf.Tensor, split: Split, mesh: Mesh, shape: Sequence[int], stacked: tuple[str, ...] = ()
) -> tf.Tensor:
    """Leaves a manual region: returns the full tensor that the shards of all devices make up.

    Each copy of a shard receives an equal share of the gradient.

    Args:
      stacked: As in `full_to_shard`.
    """
    serialized = op_sharding(split, mesh)
    copies = tiling(split, mesh).shape[-1] // mesh.parts(stacked)

    @custom_gradient
    def full_of(part: tf.Tensor):
        def gradient(d_full: tf.Tensor) -> tf.Tensor:
            share = d_full if copies == 1 else d_full / copies
            return xla_sharding.auto_to_manual_spmd_partition(share, serialized)

        return xla_sharding.manual_to_auto_spmd_partition(part, serialized, list(shape)), gradient

    return full_of(part)


def _sum_of_copies(
    part: tf.Tensor, split: Split, mesh: Mesh, shape: Sequence[int], stacked: tuple[str, ...]
) -> tf.Tensor:
    """Returns the full tensor whose shards are sums over the devices with copies of a shard."""
    used = [*stacked, *(axis for axes in split for axis in axes)]
    others = tuple(axis for axis in mesh.names if axis not in used)
    copies = shard_to_full(
        part[tf.newaxis], (others, *split), mesh, [mesh.parts(others), *shape], stacked
    )
    return tile(_added(copies), split, mesh)


def _added(copies: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the first dimension. 16-bit floats are added, and sent, as they are.

    `tf.reduce_sum` adds them in float32, which takes twice the bytes, and has XLA reduce on all
    devices what it could scatter.
    """
    if copies.dtype.size != 2:
        return tf.reduce_sum(copies, axis=0)
    number = tf.TensorSpec([], copies.dtype)
    add = tf.function(lambda one, other: one + other, autograph=False)
    sums: Any = gen_xla_ops.xla_variadic_reduce_v2(
        [copies],
        [tf.zeros([], copies.dtype)],
        dimensions_to_reduce=[0],
        reducer=add.get_concrete_function(number, number),
    )
    return sums[0]


def op_sharding(split: Split, mesh: Mesh) -> bytes:
    """Returns the split as a serialized xla.OpSharding.

    Raises:
      ValueError: An axis is unknown or repeated.
    """
    return _proto_of(_sharding(split, mesh)).SerializeToString()


def split_of(serialized: bytes, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split that an OpSharding describes, or None if mesh axes cannot express it.

    Args:
      serialized: The attribute `sharding` of an XlaSharding operation.
    """
    proto = _proto(serialized)
    if tiles_of(serialized, rank) is None:
        return None
    if proto.type == proto.REPLICATED:
        return ((),) * rank
    return split_of_tiling(_devices(proto), rank, mesh)


def tiles_of(serialized: bytes, rank: int) -> tuple[int, ...] | None:
    """Returns the number of parts of each dimension under an OpSharding.

    Args:
      serialized: A serialized xla.OpSharding, as an annotation or an HLO instruction has it.

    Returns:
      The parts; None if one device holds the tensor, or devices differ in a manual region.
    """
    proto = _proto(serialized)
    if proto.type == proto.REPLICATED:
        return (1,) * rank
    # The last dimensions of the tiling, one for each type of copies, are not the tensor's.
    is_manual = proto.MANUAL in proto.last_tile_dims
    extra = proto.replicate_on_last_tile_dim or len(proto.last_tile_dims)
    parts = tuple(proto.tile_assignment_dimensions)
    if proto.type != proto.OTHER or is_manual or len(parts) != rank + extra:
        return None
    return parts[:rank]


def annotated_split(tensor: tf.Tensor, mesh: Mesh) -> Split | None:
    """Returns the split that a tensor of a graph is annotated with; None if it has none.

    Args:
      tensor: The tensor, or an identity of the annotated one.
    """
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if operation.type != "XlaSharding":
        return None
    return split_of(operation.get_attr("sharding"), tensor.shape.rank, mesh)


def _proto(serialized: bytes) -> Any:
    return type(_proto_of(xla_sharding.Sharding.replicate())).FromString(serialized)


def _proto_of(sharding: xla_sharding.Sharding) -> Any:
    return sharding.proto


def _devices(proto: Any) -> np.ndarray:
    """Returns the partition ids of an OpSharding's tiles, [*shards, *copies].

    XLA's own shardings write them as an iota that is reshaped and transposed.
    """
    devices = np.array(proto.tile_assignment_devices)
    if not devices.size:
        shape = list(proto.iota_reshape_dims)
        devices = np.arange(math.prod(shape)).reshape(shape).transpose(proto.iota_transpose_perm)
    return devices.reshape(list(proto.tile_assignment_dimensions))


def _sharding(split: Split, mesh: Mesh) -> xla_sharding.Sharding:
    used = [axis for axes in split for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(f"Split {split} names the axis {axis!r} more than once")
    return _from_tiling(tiling(split, mesh))


def _from_tiling(devices: np.ndarray) -> xla_sharding.Sharding:
    copies = devices.shape[-1]
    if copies == devices.size:
        return xla_sharding.Sharding.replicate()
    if copies == 1:
        return xla_sharding.Sharding.tile(devices[..., 0])
    return xla_sharding.Sharding.partial_tile(devices)


def _annotate(tensor: tf.Tensor, sharding: xla_sharding.Sharding) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    annotated: Any = sharding.apply_to_tensor(tensor, use_sharding_op=True)
    return annotated
