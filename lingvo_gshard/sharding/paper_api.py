"""The sharding annotations of the GShard paper (arXiv 2006.16668, section 3.2).

Names and meanings are the paper's. These functions take dimensions and devices, where `annotate`
takes letters and a strategy. They change neither values nor shapes. On one device and in eager mode
they are the identity. XLA places a shard on every device: with fewer partitions than devices, the
remaining devices hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import current_partitioning


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates a tensor as replicated: every device holds all of it."""
    tensor = tf.convert_to_tensor(tensor)
    return tensor if _device_count() == 1 else xla.replicate(tensor)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates a tensor as partitioned along one dimension. Partition i is on device i.

    Args:
      split_dimension: The dimension. A negative number counts from the last.
      num_partitions: Number of partitions. It must divide the number of devices, but need not
        divide the dimension.

    Raises:
      ValueError: The tensor lacks the dimension, the dimension has fewer elements than partitions,
        or the number of partitions does not divide the number of devices.
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
    """Annotates a tensor as partitioned along several dimensions over given devices.

    Args:
      device_assignment: Device ids, an array of the tensor's rank. With an assignment of shape
        [1,2,4], every device has a shard [3,8,16] of a tensor [3,16,64].

    Raises:
      ValueError: The ids are not unique integers of the mesh, the ranks differ, a dimension has
        fewer elements than partitions, or the number of partitions does not divide the number of
        devices.
    """
    devices = np.asarray(device_assignment)
    what = f"shard(device_assignment of shape {list(devices.shape)})"
    tensor, rank = _ranked(tensor, what)
    if devices.ndim != rank:
        raise ValueError(
            f"{what}: {devices.ndim} dimensions for a tensor of rank {rank}. An assignment has the "
            "tensor's rank, and size 1 in dimensions that are not split"
        )
    return _assign(tensor, devices[..., np.newaxis], what)


def mesh_split(
    tensor: tf.Tensor, device_mesh: npt.ArrayLike, tensor_split_dims_mapping: Sequence[int]
) -> tf.Tensor:
    """Annotates a tensor as partitioned over a mesh of devices.

    Args:
      device_mesh: Device ids, an array of any rank.
      tensor_split_dims_mapping: For each dimension of the tensor the dimension of `device_mesh`
        that it is split over, or -1 if it is not split.

    Raises:
      ValueError: The mapping has another length than the tensor's rank, uses a dimension that the
        mesh lacks or uses one twice, or the ids are invalid as in `shard`.
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
                "or -1 for a dimension that is not split"
            )
        if used.count(dimension) > 1:
            raise ValueError(f"{what}: dimension {dimension} of the mesh is used more than once")
    copies = [dimension for dimension in range(devices.ndim) if dimension not in used]
    parts = [1 if dimension == -1 else devices.shape[dimension] for dimension in mapping]
    return _assign(tensor, devices.transpose(used + copies).reshape([*parts, -1]), what)


def _ranked(tensor: tf.Tensor, what: str) -> tuple[tf.Tensor, int]:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank is None:
        raise ValueError(f"{what}: the tensor's rank is unknown")
    return tensor, tensor.shape.rank


def _assign(tensor: tf.Tensor, devices: np.ndarray, what: str) -> tf.Tensor:
    """Annotates a tensor with devices [*partitions, copies], after checking them.

    Args:
      devices: Device ids. The last dimension lists the devices that hold copies of a partition.
      what: The call, for messages.
    """
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
        raise ValueError(f"{what}: device ids must be integers, not {devices.dtype}")
    if not devices.size:
        raise ValueError(f"{what}: it lists no devices")
    ids, counts = np.unique(devices, return_counts=True)
    if ids[0] < 0:
        raise ValueError(f"{what}: device {ids[0]} is negative")
    if counts.max() > 1:
        raise ValueError(f"{what}: device {ids[counts.argmax()]} is repeated")


def _on_all(devices: np.ndarray, count: int, what: str) -> np.ndarray:
    """Returns the same partitions with copies on the devices of the mesh that have none."""
    have = f"`mesh={_mesh()}` has {count} devices"
    if devices.max() >= count and devices.size <= count:
        raise ValueError(
            f"{what}: there is no device {devices.max()}. {have}, from 0 to {count - 1}"
        )
    if count % devices.size:
        raise ValueError(
            f"{what} uses {devices.size} devices, but {have}. Use a number that divides {count}"
        )
    others = np.setdiff1d(np.arange(count), devices).reshape([-1, *devices.shape])
    return np.concatenate([devices, *others], axis=-1)


def _mesh() -> Mesh | None:
    current = current_partitioning()
    return None if current is None else current.mesh


def _device_count() -> int | None:
    """Returns the number of devices of the mesh, or None without a partitioning."""
    mesh = _mesh()
    return None if mesh is None else mesh.size
