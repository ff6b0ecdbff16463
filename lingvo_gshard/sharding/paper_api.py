"""The paper's own annotations (GShard, arXiv:2006.16668, section 3.2), exact in name and meaning.

They name dimensions and devices where `annotate` has letters and a strategy. None changes a value
or a shape: on one device, and outside a graph, each is the identity. XLA places a part on every
device, so where fewer partitions than devices are asked for, the others hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.partitioning import current_partitioning


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates a tensor as held whole by every device."""
    tensor = tf.convert_to_tensor(tensor)
    return tensor if _device_count() == 1 else xla.replicate(tensor)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates a tensor as partitioned along one dimension; partition i is on device i.

    split_dimension: negative counts from the last. num_partitions: may be fewer than the devices,
    and need not divide the dimension.

    Raises ValueError for a dimension the tensor does not have, for more partitions than it has
    elements, and for a number that the devices of the mesh in use are no multiple of.
    """
    what = f"split(split_dimension={split_dimension}, num_partitions={num_partitions})"
    tensor, rank = _ranked(tensor, what)
    if not -rank <= split_dimension < rank:
        raise ValueError(f"{what}: the tensor has the dimensions 0 to {rank - 1}")
    if num_partitions < 1:
        raise ValueError(f"{what}: num_partitions must be at least 1")
    parts = [1] * rank
    parts[split_dimension] = num_partitions
    return _assign(tensor, np.arange(num_partitions).reshape([*parts, 1]), what)


def shard(tensor: tf.Tensor, device_assignment: npt.ArrayLike) -> tf.Tensor:
    """Annotates a tensor as partitioned along several dimensions, and says on which devices.

    device_assignment: device ids, in as many dimensions as the tensor has. Of a tensor [3,16,64]
    and an assignment of shape [1,2,4] every device has a part [3,8,16].

    Raises ValueError if the ids are no integers, negative, not of the mesh in use or not unique, if
    the ranks differ, and as `split` does.
    """
    devices = np.asarray(device_assignment)
    what = f"shard(device_assignment of shape {list(devices.shape)})"
    tensor, rank = _ranked(tensor, what)
    if devices.ndim != rank:
        raise ValueError(
            f"{what}: {devices.ndim} dimensions for a tensor of rank {rank}; an assignment has the "
            "tensor's rank, with 1 where a dimension is whole"
        )
    return _assign(tensor, devices[..., np.newaxis], what)


def mesh_split(
    tensor: tf.Tensor, device_mesh: npt.ArrayLike, tensor_split_dims_mapping: Sequence[int]
) -> tf.Tensor:
    """Annotates a tensor as partitioned over a mesh of devices.

    device_mesh: device ids, of any rank. tensor_split_dims_mapping: for each dimension of the
    tensor the dimension of `device_mesh` that it is split over, or -1 for whole.

    Raises ValueError for a mapping of another length than the tensor's rank, for a dimension the
    mesh does not have or that is used twice, and as `shard` does.
    """
    devices, mapping = np.asarray(device_mesh), list(tensor_split_dims_mapping)
    what = f"mesh_split(device_mesh of shape {list(devices.shape)}, {mapping})"
    tensor, rank = _ranked(tensor, what)
    if len(mapping) != rank:
        raise ValueError(f"{what}: {len(mapping)} entries for a tensor of rank {rank}")
    used = [dimension for dimension in mapping if dimension != -1]
    for dimension in used:
        if not 0 <= dimension < devices.ndim:
            raise ValueError(
                f"{what}: the mesh has no dimension {dimension}; expected 0 to {devices.ndim - 1}, "
                "or -1 for whole"
            )
        if used.count(dimension) > 1:
            raise ValueError(f"{what}: dimension {dimension} of the mesh is used more than once")
    copies = [dimension for dimension in range(devices.ndim) if dimension not in used]
    parts = [1 if dimension == -1 else devices.shape[dimension] for dimension in mapping]
    return _assign(tensor, devices.transpose(used + copies).reshape([*parts, -1]), what)


def _ranked(tensor: tf.Tensor, what: str) -> tuple[tf.Tensor, int]:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank is None:
        raise ValueError(f"{what}: the tensor's rank is not known")
    return tensor, tensor.shape.rank


def _assign(tensor: tf.Tensor, devices: np.ndarray, what: str) -> tf.Tensor:
    """Annotates by ids in the tensor's dimensions and, in one more, those that hold copies."""
    _check_ids(devices, what)
    for dimension, (parts, size) in enumerate(zip(devices.shape, tensor.shape, strict=False)):
        if size is not None and parts > size:
            raise ValueError(
                f"{what}: {parts} partitions of dimension {dimension}, which has only {size}"
            )
    count = _device_count()
    if count == 1:
        return tensor
    return xla.assign(tensor, devices if count is None else _on_all(devices, count, what))


def _check_ids(devices: np.ndarray, what: str) -> None:
    if not np.issubdtype(devices.dtype, np.integer):
        raise ValueError(f"{what}: device ids are integers, not {devices.dtype}")
    if not devices.size:
        raise ValueError(f"{what}: there are no devices in it")
    ids, counts = np.unique(devices, return_counts=True)
    if ids[0] < 0:
        raise ValueError(f"{what}: device {ids[0]} is negative")
    if counts.max() > 1:
        raise ValueError(f"{what}: device {ids[counts.argmax()]} is in it more than once")


def _on_all(devices: np.ndarray, count: int, what: str) -> np.ndarray:
    """The same parts, with copies of them on those of `count` devices that have none."""
    have = f"the mesh in use, {current_partitioning().mesh}, has {count} devices"
    if devices.max() >= count and devices.size <= count:
        raise ValueError(f"{what}: no device {devices.max()}; {have}, from 0 to {count - 1}")
    if count % devices.size:
        raise ValueError(f"{what} takes {devices.size} devices, but {have}; it must divide them")
    others = np.setdiff1d(np.arange(count), devices).reshape([-1, *devices.shape])
    return np.concatenate([devices, *others], axis=-1)


def _device_count() -> int | None:
    """The devices of the mesh in use; None where nothing says how many there will be."""
    current = current_partitioning()
    return None if current is None else current.mesh.size
