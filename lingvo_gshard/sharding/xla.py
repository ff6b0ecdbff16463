"""Splits as XLA's OpSharding; the only file that knows TensorFlow's private sharding module.

A split says per dimension over which axes of the mesh it is cut: `(("data",), (), ("model",))`;
`()` is whole. TensorFlow writes it into the graph as an XlaSharding operation, which lowers to
`custom_call @Sharding` in StableHLO, and annotates the gradient as it does the tensor itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

try:
    from tensorflow.python.compiler.xla.experimental import xla_sharding
except ImportError as error:
    raise ImportError(
        f"TensorFlow {tf.__version__} no longer has its private module {error.name}. "
        "lingvo_gshard/sharding/xla.py is the one file that needs it."
    ) from error


def tile(tensor: tf.Tensor, split: Split, mesh: Mesh) -> tf.Tensor:
    """Returns the tensor, annotated as split over the mesh's axes, and so is its gradient.

    A dimension over several axes is cut along the first, and each part along the next. Devices
    along axes that the split does not name hold copies; a split of wholes only is annotated as
    replicated. Outside a graph it is the identity.

    Raises ValueError if the tensor has another rank, or an axis is unknown or stands twice.
    """
    if tensor.shape.rank not in (None, len(split)):
        raise ValueError(
            f"Split {split} has {len(split)} dimensions for a tensor of rank {tensor.shape.rank}"
        )
    return _annotate(tensor, _sharding(split, mesh))


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, annotated as held whole by every device."""
    return _annotate(tensor, xla_sharding.Sharding.replicate())


def assign(tensor: tf.Tensor, devices: np.ndarray) -> tf.Tensor:
    """Returns the tensor, annotated as cut into the parts that `devices` arranges.

    devices: partition ids in the tensor's dimensions and one more: the devices along that last one
        hold copies of the same part. XLA wants every device of the program in it, once.
    """
    return _annotate(tensor, _from_tiling(devices))


def full_to_shard(tensor: tf.Tensor, split: Split, mesh: Mesh) -> tf.Tensor:
    """Returns one device's part of the tensor; what is computed from it is not partitioned.

    The gradient is the sum of those of the copies that several devices have of a part.
    """

    @custom_gradient
    def part_of(whole: tf.Tensor):
        def gradient(d_part: tf.Tensor) -> tf.Tensor:
            return _sum_of_copies(d_part, split, mesh, whole.shape)

        return xla_sharding.auto_to_manual_spmd_partition(whole, op_sharding(split, mesh)), gradient

    return part_of(tensor)


def shard_to_full(part: tf.Tensor, split: Split, mesh: Mesh, shape: Sequence[int]) -> tf.Tensor:
    """Returns the tensor of which every device holds a part; `shape` is the whole's.

    The whole is as much each copy's work as the others': each gets an equal share of the gradient.
    """
    serialized = op_sharding(split, mesh)
    copies = _tiling(split, mesh).shape[-1]

    @custom_gradient
    def whole_of(part: tf.Tensor):
        def gradient(d_whole: tf.Tensor) -> tf.Tensor:
            share = d_whole if copies == 1 else d_whole / copies
            return xla_sharding.auto_to_manual_spmd_partition(share, serialized)

        return xla_sharding.manual_to_auto_spmd_partition(part, serialized, list(shape)), gradient

    return whole_of(part)


def _sum_of_copies(part: tf.Tensor, split: Split, mesh: Mesh, shape: Sequence[int]) -> tf.Tensor:
    """The whole whose parts are sums over the devices that the split leaves with copies."""
    used = [axis for axes in split for axis in axes]
    others = tuple(axis for axis in mesh.names if axis not in used)
    stacked = shard_to_full(
        part[tf.newaxis], (others, *split), mesh, [_tiling(split, mesh).shape[-1], *shape]
    )
    return tile(tf.reduce_sum(stacked, axis=0), split, mesh)


def op_sharding(split: Split, mesh: Mesh) -> bytes:
    """Returns the split as a serialized xla.OpSharding; ValueError as `tile`."""
    return _sharding(split, mesh).proto.SerializeToString()


def split_of(serialized: bytes, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split that an OpSharding is on a mesh, or None if no axes of it make that split.

    serialized: the `sharding` of an XlaSharding operation, on a tensor of that rank.
    """
    proto = type(xla_sharding.Sharding.replicate().proto).FromString(serialized)
    if proto.type == proto.REPLICATED:
        return ((),) * rank
    parts = list(proto.tile_assignment_dimensions)
    if proto.type != proto.OTHER or len(parts) != rank + proto.replicate_on_last_tile_dim:
        return None
    devices = _sorted_copies(np.reshape(proto.tile_assignment_devices, parts), rank)
    if devices.size != mesh.size:
        return None
    axes = [name for name, size in mesh.axes if size > 1]
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            split = _dealt(order, parts[:rank], mesh)
            if split and np.array_equal(_sorted_copies(_tiling(split, mesh), rank), devices):
                return split
    return None


def _sharding(split: Split, mesh: Mesh) -> xla_sharding.Sharding:
    used = [axis for axes in split for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(f"Split {split} names the axis {axis!r} more than once")
    return _from_tiling(_tiling(split, mesh))


def _from_tiling(devices: np.ndarray) -> xla_sharding.Sharding:
    copies = devices.shape[-1]
    if copies == devices.size:
        return xla_sharding.Sharding.replicate()
    if copies == 1:
        return xla_sharding.Sharding.tile(devices[..., 0])
    return xla_sharding.Sharding.partial_tile(devices)


def _tiling(split: Split, mesh: Mesh) -> np.ndarray:
    """Partition ids in the tensor's dimensions, and in one more those that hold copies."""
    used = [axis for axes in split for axis in axes]
    parts = [math.prod(mesh.axis_size(axis) for axis in axes) for axes in split]
    order = used + [axis for axis in mesh.names if axis not in used]
    return mesh.ids.transpose([mesh.names.index(axis) for axis in order]).reshape([*parts, -1])


def _annotate(tensor: tf.Tensor, sharding: xla_sharding.Sharding) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    return sharding.apply_to_tensor(tensor, use_sharding_op=True)


def _sorted_copies(devices: np.ndarray, rank: int) -> np.ndarray:
    """The same tiling with its copies in their last dimension and in one order."""
    return np.sort(devices.reshape([*devices.shape[:rank], -1]), axis=-1)


def _dealt(axes: Sequence[str], parts: Sequence[int], mesh: Mesh) -> Split | None:
    """The axes in their order, dealt to dimensions of so many parts; None if that does not fit."""
    left, split = list(axes), []
    for count in parts:
        taken: list[str] = []
        while left and math.prod(mesh.axis_size(axis) for axis in taken) < count:
            taken.append(left.pop(0))
        if math.prod(mesh.axis_size(axis) for axis in taken) != count:
            return None
        split.append(tuple(taken))
    return None if left else tuple(split)
