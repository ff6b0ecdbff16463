"""Array: one input or output of a program, and how it is laid out over a mesh."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, jax, jnp
from lingvo_gshard.core.memory_kinds import HOST


@dataclasses.dataclass(frozen=True)
class Array:
    """An input or output of a program.

    Attributes:
      path: dotted path, such as `theta.encoder.w`.
      shape: global shape.
      dtype: name of the NumPy dtype.
      split: for each dimension the mesh axes it is split over. None, for outputs only, leaves the
        layout to the partitioner.
      is_on_host: whether the array lives in the memory of each device's host. UNSET is False:
        files of programs without such arrays do not have the field.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    split: tuple[tuple[str, ...], ...] | None
    is_on_host: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self):
        if any(size < 0 for size in self.shape):
            raise UserError(f"{self.path} has the shape {list(self.shape)}, with a negative size")
        if self.split is not None and len(self.split) != len(self.shape):
            raise UserError(
                f"{self.path} has {len(self.shape)} dimensions, but {len(self.split)} are split"
            )

    def sharding(self, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding | None:
        """Returns the layout over a mesh of devices; None if it is left to the partitioner."""
        if self.split is None:
            return None
        return jax.sharding.NamedSharding(
            mesh,
            jax.sharding.PartitionSpec(*(axes or None for axes in self.split)),
            memory_kind=HOST if self.is_on_host else None,
        )

    def known_sharding(self, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
        """Returns the layout over a mesh of devices of an array that has one, as inputs have."""
        sharding = self.sharding(mesh)
        assert sharding is not None, f"{self.path} is laid out by the partitioner"
        return sharding

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype without a layout."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def sharded_struct(self, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
        """Returns shape, dtype and layout over a mesh of devices."""
        return jax.ShapeDtypeStruct(self.shape, self.struct.dtype, sharding=self.sharding(mesh))

    def stacked(self, count: int, axes: tuple[str, ...] = ()) -> Array:
        """Returns the array of `count` such arrays, stacked along a first dimension over `axes`."""
        split = (axes, *(self.split or ()))
        return dataclasses.replace(self, shape=(count, *self.shape), split=split)

    def put(
        self, value: np.ndarray | jax.Array, mesh: jax.sharding.Mesh, is_donated: bool = False
    ) -> jax.Array:
        """Returns a value in this layout. Of a NumPy array each process copies its own shards.

        Args:
          value: returned itself if it is a jax.Array with this layout.
          is_donated: whether the result will be donated to a call; then it shares no memory with
            `value` unless it is `value`.

        Raises:
          UserError: the value has another shape or dtype.
        """
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        if (tuple(value.shape), value.dtype.name) != (self.shape, self.dtype):
            raise UserError(
                f"{self.path} is {self.dtype}{list(self.shape)}, but the value for it is "
                f"{value.dtype.name}{list(value.shape)}"
            )
        sharding = self.known_sharding(mesh)
        if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        with jax.enable_x64(True):
            if isinstance(value, np.ndarray):
                # A copy: jax would go on reading the memory of what the caller may write to.
                return jax.make_array_from_callback(
                    self.shape, sharding, lambda index: np.array(value[index])
                )
            resharded = jax.device_put(value, sharding)
            return _copy_of_shards(resharded) if is_donated else resharded


def _copy_of_shards(array: jax.Array) -> jax.Array:
    """Returns a copy that shares no memory. The result of device_put may, even with donation."""
    kind = array.sharding.memory_kind
    shards = [
        jax.device_put(
            np.array(s.data), jax.sharding.SingleDeviceSharding(s.device, memory_kind=kind)
        )
        for s in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
