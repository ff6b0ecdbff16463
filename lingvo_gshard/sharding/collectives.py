"""Collectives for manual regions: what devices say to one another, asked for by name.

Each takes this device's part, inside a region of `manual`, and the axis or axes of the mesh whose
devices take part; each is differentiable. None is an operation of its own: TensorFlow's collectives
(XlaAllReduce, XlaReduceScatter) lower to groups of replicas, and a partitioned program is one
replica. So the parts are handed to the partitioner as one tensor with the devices in its first
dimensions, and it is asked for the whole's sum, or for another split of it: which it does by the
collective in question, of the least bytes. Over no axes, on one device, or without a partitioning
in use, they are the identity.
"""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.manual import mesh_in_use
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

Axes = str | tuple[str, ...]


def psum(part: tf.Tensor, axes: Axes) -> tf.Tensor:
    """Returns the sum of the parts of all devices along `axes`: one all-reduce.

    Raises ValueError for an axis that the mesh does not have.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    return _from_whole(_summed(part, axes, mesh), axes, ((),) * part.shape.rank, mesh)


def reduce_scatter(part: tf.Tensor, axes: Axes, dimension: int) -> tf.Tensor:
    """Returns this device's slice, along one dimension, of the sum over devices along `axes`.

    One reduce-scatter; XLA on CPU makes an all-reduce and a slice of it. Raises ValueError as
    `psum` does, and if the dimension does not divide by the devices.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    _check_divides(part, dimension, axes, mesh)
    split = _over(axes, dimension, part)
    return _from_whole(_summed(part, axes, mesh), axes, split, mesh)


def all_gather(part: tf.Tensor, axes: Axes, dimension: int) -> tf.Tensor:
    """Returns the parts of all devices along `axes`, side by side in one dimension: all-gather.

    Raises ValueError as `psum` does.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    whole = _to_whole(part, axes, _over(axes, dimension, part), mesh)
    return _from_whole(whole, axes, ((),) * part.shape.rank, mesh)


def all_to_all(
    part: tf.Tensor, axes: Axes, split_dimension: int, concat_dimension: int
) -> tf.Tensor:
    """Returns what devices along `axes` have for this one: device i's i-th slices, side by side.

    Every part is cut along `split_dimension`, one slice for each device; those received are put
    side by side along `concat_dimension`. One all-to-all. Raises ValueError as `reduce_scatter`
    does, and if both dimensions are the same.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    if (split_dimension - concat_dimension) % part.shape.rank == 0:
        raise ValueError(f"all_to_all: both dimensions are {split_dimension}")
    _check_divides(part, split_dimension, axes, mesh)
    whole = _to_whole(part, axes, _over(axes, concat_dimension, part), mesh)
    return _from_whole(whole, axes, _over(axes, split_dimension, part), mesh)


def rotate(part: tf.Tensor, axis: str, shift: int = 1) -> tf.Tensor:
    """Returns the part of the device `shift` before this one along a ring: collective-permute.

    Raises ValueError as `psum` does.
    """
    mesh, axes = _mesh_with(axis)
    if mesh is None or not shift % mesh.axis_size(axis):
        return part
    return _rotate(part, axes, shift % mesh.axis_size(axis), mesh)


def rotated(x: tf.Tensor, dimension: int, shift: int = 1) -> tf.Tensor:
    """Returns a tensor whose slices along one dimension are moved on cyclically.

    If the dimension is split over devices, one slice each, XLA compiles this into one
    collective-permute. It does not do so for tf.roll or a gather. Needs no manual region.

    Args:
      x: The tensor.
      dimension: The dimension to rotate.
      shift: The slice at i moves to i + shift, modulo the size.
    """
    before = (slice(None),) * dimension
    last, rest = x[(*before, slice(-shift, None))], x[(*before, slice(None, -shift))]
    return tf.concat([last, rest], dimension)


def axis_index(axis: str) -> tf.Tensor:
    """Returns this device's place along an axis, a scalar int32 from 0; 0 on one device.

    Raises ValueError as `psum` does.
    """
    mesh, axes = _mesh_with(axis)
    if mesh is None:
        return tf.constant(0, tf.int32)
    places = tf.range(mesh.axis_size(axis), dtype=tf.int32)
    return xla.full_to_shard(places, (axes,), mesh)[0]


def _mesh_with(axes: Axes) -> tuple[Mesh | None, tuple[str, ...]]:
    """The mesh, or None if there is nothing to do, and the axes as a tuple."""
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh = mesh_in_use()
    return (mesh, axes) if mesh and _count(axes, mesh) > 1 else (None, axes)


def _count(axes: tuple[str, ...], mesh: Mesh) -> int:
    return math.prod(mesh.axis_size(axis) for axis in axes)


def _over(axes: tuple[str, ...], dimension: int, part: tf.Tensor) -> Split:
    """The split of one dimension over axes, the others whole."""
    dimension %= part.shape.rank
    return tuple(axes if i == dimension else () for i in range(part.shape.rank))


def _others(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.names if axis not in axes)


def _to_whole(part: tf.Tensor, axes: tuple[str, ...], split: Split, mesh: Mesh) -> tf.Tensor:
    """All devices' parts as one tensor: first the devices along other axes, then as `split`."""
    others = _others(axes, mesh)
    shape = [size * _count(over, mesh) for size, over in zip(part.shape, split, strict=True)]
    whole_shape = [_count(others, mesh), *shape]
    return xla.shard_to_full(part[tf.newaxis], (others, *split), mesh, whole_shape)


def _from_whole(whole: tf.Tensor, axes: tuple[str, ...], split: Split, mesh: Mesh) -> tf.Tensor:
    """The reverse: this device's part of what `_to_whole` returns."""
    return xla.full_to_shard(whole, (_others(axes, mesh), *split), mesh)[0]


def _rotate(part: tf.Tensor, axes: tuple[str, ...], shift: int, mesh: Mesh) -> tf.Tensor:
    split = (axes, *((),) * part.shape.rank)

    @custom_gradient
    def compute(part: tf.Tensor):
        whole = _to_whole(part[tf.newaxis], axes, split, mesh)
        return (
            _from_whole(rotated(whole, 1, shift), axes, split, mesh)[0],
            lambda d: _rotate(d, axes, _count(axes, mesh) - shift, mesh),
        )

    return compute(part)


def _summed(part: tf.Tensor, axes: tuple[str, ...], mesh: Mesh) -> tf.Tensor:
    """What `_to_whole` returns of the sum of the parts of devices along `axes`."""
    split = (axes, *((),) * part.shape.rank)
    return tf.reduce_sum(_to_whole(part[tf.newaxis], axes, split, mesh), axis=1)


def _check_divides(part: tf.Tensor, dimension: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    if part.shape[dimension] % _count(axes, mesh):
        raise ValueError(
            f"Dimension {dimension} of a part {part.shape} does not divide by the "
            f"{_count(axes, mesh)} devices along {', '.join(axes)} of --mesh={mesh}"
        )
