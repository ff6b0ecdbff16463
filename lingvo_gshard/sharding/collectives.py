"""Collectives between the devices of a mesh, for manual regions.

Each function takes this device's shard, inside a region of `manual`, and the mesh axes along which
devices communicate. Each is differentiable. Without a partitioning, on one device, or along no axes
it is the identity.

TensorFlow's own collectives (XlaAllReduce, XlaReduceScatter) communicate between replicas, but a
partitioned program is a single replica. These functions instead leave the manual region, ask the
partitioner for a sum or another split of the full tensor, and enter the region again. The
partitioner compiles that into the collective.
"""

from __future__ import annotations

from lingvo_gshard.core import custom_gradient, known_sizes, listed, tf
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.manual import mesh_in_use
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

Axes = str | tuple[str, ...]


def psum(part: tf.Tensor, axes: Axes) -> tf.Tensor:
    """Returns the sum of the shards of all devices along `axes`, by one all-reduce.

    Raises:
      ValueError: The mesh lacks one of the axes.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    return _from_full(_summed(part, axes, mesh), axes, ((),) * part.shape.rank, mesh)


def reduce_scatter(
    part: tf.Tensor, axes: Axes, dimension: int, keeps_type: bool = False
) -> tf.Tensor:
    """Returns this device's slice of the sum over devices, by one reduce-scatter.

    XLA for CPU compiles it into an all-reduce and a slice. All sums are added in float32.

    Args:
      part: This device's summand.
      axes: Mesh axes to sum over.
      keeps_type: Whether 16-bit floats are sent as they are, by one all-to-all, and added by the
        device that gets the sum. That takes half the bytes. Otherwise they are sent in float32.

    Raises:
      ValueError: The mesh lacks an axis, or the dimension does not divide by the devices.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    _check_divides(part, dimension, axes, mesh)
    split = _over(axes, dimension, part)

    @custom_gradient
    def compute(part: tf.Tensor):
        if keeps_type and part.dtype.size == 2:
            sent = all_to_all(part[tf.newaxis], axes, dimension % part.shape.rank + 1, 0)
            own = tf.reduce_sum(sent, 0)
        else:
            own = _from_full(_summed(part, axes, mesh), axes, split, mesh)
        return own, lambda d: all_gather(d, axes, dimension)

    return compute(part)


def all_gather(part: tf.Tensor, axes: Axes, dimension: int) -> tf.Tensor:
    """Returns the shards of all devices along `axes`, concatenated, by one all-gather.

    The gradient is a reduce-scatter.

    Args:
      axes: Mesh axes to gather over.
      dimension: The dimension to concatenate.

    Raises:
      ValueError: The mesh lacks one of the axes.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    split = _over(axes, dimension, part)

    @custom_gradient
    def compute(part: tf.Tensor):
        whole = _from_full(_to_full(part, axes, split, mesh), axes, ((),) * part.shape.rank, mesh)
        return whole, lambda d: reduce_scatter(d, axes, dimension)

    return compute(part)


def all_to_all(
    part: tf.Tensor, axes: Axes, split_dimension: int, concat_dimension: int
) -> tf.Tensor:
    """Sends the i-th slice of this device's shard to device i along `axes`, by one all-to-all.

    Args:
      axes: Mesh axes along which devices exchange slices.
      split_dimension: The dimension to cut into one slice for each device.
      concat_dimension: The dimension along which received slices are concatenated.

    Returns:
      The slices that this device receives, in the order of the devices.

    Raises:
      ValueError: The mesh lacks an axis, `split_dimension` does not divide by the devices, or both
        dimensions are the same.
    """
    mesh, axes = _mesh_with(axes)
    if mesh is None:
        return part
    if (split_dimension - concat_dimension) % part.shape.rank == 0:
        raise ValueError(f"all_to_all: both dimensions are {split_dimension}")
    _check_divides(part, split_dimension, axes, mesh)
    full = _to_full(part, axes, _over(axes, concat_dimension, part), mesh)
    return _from_full(full, axes, _over(axes, split_dimension, part), mesh)


def rotate(part: tf.Tensor, axis: str, shift: int = 1) -> tf.Tensor:
    """Returns the shard of the device `shift` places before this one, by one collective-permute.

    Args:
      axis: Mesh axis, read as a ring.
      shift: Distance along the ring.

    Raises:
      ValueError: The mesh lacks the axis.
    """
    mesh, axes = _mesh_with(axis)
    if mesh is None or not shift % mesh.axis_size(axis):
        return part
    return _rotate(part, axes, shift % mesh.axis_size(axis), mesh)


def mirror(part: tf.Tensor, axis: str) -> tf.Tensor:
    """Returns the shard of the device at the same place from the end, by one collective-permute.

    Args:
      axis: Mesh axis; device i of n receives the shard of device n - 1 - i.

    Raises:
      ValueError: The mesh lacks the axis.
    """
    mesh, axes = _mesh_with(axis)
    return part if mesh is None else _mirror(part, axes, mesh)


def rotated(x: tf.Tensor, dimension: int, shift: int = 1) -> tf.Tensor:
    """Returns a tensor whose slices along one dimension are moved on cyclically.

    If the dimension is split over devices, one slice each, XLA compiles this into one
    collective-permute. It does not do so for tf.roll or a gather. Needs no manual region.

    Args:
      dimension: The dimension to rotate.
      shift: The slice at i moves to i + shift, modulo the size.
    """
    before = (slice(None),) * dimension
    last, rest = x[(*before, slice(-shift, None))], x[(*before, slice(None, -shift))]
    return tf.concat([last, rest], dimension)


def axis_index(axis: str) -> tf.Tensor:
    """Returns this device's index along a mesh axis, an int32 scalar; 0 on one device.

    Raises:
      ValueError: The mesh lacks the axis.
    """
    mesh, axes = _mesh_with(axis)
    if mesh is None:
        return tf.constant(0, tf.int32)
    places = tf.range(mesh.axis_size(axis), dtype=tf.int32)
    return xla.full_to_shard(places, (axes,), mesh)[0]


def place_along(axes: Axes) -> tf.Tensor:
    """Returns this device's place in the order of `all_gather`, an int32 scalar; 0 on one device.

    Args:
      axes: Mesh axes, the first of them the slowest.

    Raises:
      ValueError: The mesh lacks one of the axes.
    """
    mesh, axes = _mesh_with(axes)
    place = tf.constant(0, tf.int32)
    if mesh is not None:
        for axis in axes:
            place = place * mesh.axis_size(axis) + axis_index(axis)
    return place


def _mesh_with(axes: Axes) -> tuple[Mesh | None, tuple[str, ...]]:
    """Returns the axes as a tuple, and the mesh, or None if there is nothing to communicate."""
    axes = listed(axes)
    mesh = mesh_in_use()
    return (mesh, axes) if mesh and mesh.parts(axes) > 1 else (None, axes)


def _over(axes: tuple[str, ...], dimension: int, part: tf.Tensor) -> Split:
    """Returns the split of one dimension of `part` over axes; the others are not split."""
    dimension %= part.shape.rank
    return tuple(axes if i == dimension else () for i in range(part.shape.rank))


def _others(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.names if axis not in axes)


def _to_full(part: tf.Tensor, axes: tuple[str, ...], split: Split, mesh: Mesh) -> tf.Tensor:
    """Returns the shards of all devices as one tensor.

    Its first dimension indexes the devices along the other axes. The remaining dimensions are split
    as `split` says.
    """
    others = _others(axes, mesh)
    shape = [
        size * mesh.parts(over) for size, over in zip(known_sizes(part.shape), split, strict=True)
    ]
    full_shape = [mesh.parts(others), *shape]
    return xla.shard_to_full(part[tf.newaxis], (others, *split), mesh, full_shape)


def _from_full(full: tf.Tensor, axes: tuple[str, ...], split: Split, mesh: Mesh) -> tf.Tensor:
    """Returns this device's shard of a tensor that `_to_full` made."""
    return xla.full_to_shard(full, (_others(axes, mesh), *split), mesh)[0]


def _rotate(part: tf.Tensor, axes: tuple[str, ...], shift: int, mesh: Mesh) -> tf.Tensor:
    split = (axes, *((),) * part.shape.rank)

    @custom_gradient
    def compute(part: tf.Tensor):
        full = _to_full(part[tf.newaxis], axes, split, mesh)
        return (
            _from_full(rotated(full, 1, shift), axes, split, mesh)[0],
            lambda d: _rotate(d, axes, mesh.parts(axes) - shift, mesh),
        )

    return compute(part)


def _mirror(part: tf.Tensor, axes: tuple[str, ...], mesh: Mesh) -> tf.Tensor:
    split = (axes, *((),) * part.shape.rank)

    @custom_gradient
    def compute(part: tf.Tensor):
        full = _to_full(part[tf.newaxis], axes, split, mesh)
        mirrored = _from_full(tf.reverse(full, [1]), axes, split, mesh)[0]
        return mirrored, lambda d: _mirror(d, axes, mesh)

    return compute(part)


def _summed(part: tf.Tensor, axes: tuple[str, ...], mesh: Mesh) -> tf.Tensor:
    """Returns the sum of the shards along `axes` in the form of `_to_full`."""
    split = (axes, *((),) * part.shape.rank)
    return tf.reduce_sum(_to_full(part[tf.newaxis], axes, split, mesh), axis=1)


def _check_divides(part: tf.Tensor, dimension: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    if known_sizes(part.shape)[dimension] % mesh.parts(axes):
        raise ValueError(
            f"Dimension {dimension} of a shard {part.shape} does not divide by the "
            f"{mesh.parts(axes)} devices along {', '.join(axes)} of `mesh={mesh}`"
        )
