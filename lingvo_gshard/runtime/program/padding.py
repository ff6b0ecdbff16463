"""Padding of arrays of the state, which are stored in equal parts, and their shapes without it.

jax stores arrays in equal parts only. A dimension that the devices do not divide evenly is stored
with zeros at its end. A program first cuts the zeros off, and finally appends zeros again.

Checkpoints and everything else outside of a runtime see arrays without padding. Such an array is
split over a divisor of the number of devices, so that no device holds the whole array: with 48
devices, a dimension of 4,096 is stored as 4,128 and shown in 16 parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import jax, jnp, known_sizes, tf
from lingvo_gshard.runtime.program.array import Array


def cut(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns a stored tensor without its padding."""
    if list(shape) == known_sizes(tensor.shape):
        return tensor
    return tf.slice(tensor, [0] * len(shape), shape)


def padded(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns a tensor with the padding of a stored shape."""
    return (
        tensor
        if list(shape) == known_sizes(tensor.shape)
        else tf.pad(tensor, _widths(tensor, shape))
    )


def shown(array: Array, shape: Sequence[int], mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of a stored array without its padding."""
    if tuple(shape) == array.shape:
        return array.sharded_struct(mesh)
    sharding = _dividing(array, shape, mesh)
    return jax.ShapeDtypeStruct(tuple(shape), array.struct.dtype, sharding=sharding)


def show(
    array: Array, value: jax.Array, shape: Sequence[int], mesh: jax.sharding.Mesh
) -> jax.Array:
    """Returns a stored value without its padding; arguments are as in `shown`."""
    if tuple(shape) == array.shape:
        return value
    # XLA for CPU has no threads for the exchanges of many arrays at once.
    return jax.block_until_ready(_cutting(tuple(shape), _dividing(array, shape, mesh))(value))


def put(
    array: Array,
    value: Any,
    shape: Sequence[int],
    mesh: jax.sharding.Mesh,
    is_donated: bool = False,
) -> jax.Array:
    """Returns a value without padding as it is stored; see `Array.put`.

    Raises:
      UserError: the value has another shape or dtype.
    """
    if tuple(shape) == array.shape:
        return array.put(value, mesh, is_donated)
    struct = shown(array, shape, mesh)
    split: Any = struct.sharding
    plain = Array(array.path, tuple(shape), array.dtype, _split_of(split, len(array.shape)))
    value = plain.put(value, split.mesh)
    return jax.block_until_ready(_padding(array.shape, array.known_sharding(mesh))(value))


@functools.cache
def _cutting(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> Any:
    return jax.jit(lambda x: x[tuple(map(slice, shape))], out_shardings=sharding)


@functools.cache
def _padding(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> Any:
    return jax.jit(lambda x: jnp.pad(x, _widths(x, shape)), out_shardings=sharding)


def _widths(x: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, stored - size) for stored, size in zip(shape, x.shape, strict=True)]


def _split_of(sharding: jax.sharding.NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dimension."""
    found = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec]
    return (*found, *((),) * (rank - len(found)))


def _dividing(
    array: Array, shape: Sequence[int], mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    """Returns the sharding of an array without padding, over a mesh with some axes cut in two.

    Each dimension is split over the axes that split it in storage, the major first, as far as they
    divide it. Of the first axis that does not, the largest divisor is used.
    """
    factors = {name: mesh.shape[name] for name in mesh.axis_names}
    split: list[tuple[str, ...]] = []
    for size, axes in zip(shape, array.split or (), strict=True):
        used: list[str] = []
        for axis in axes:
            part = math.gcd(size, mesh.shape[axis])
            size //= part
            if part == mesh.shape[axis]:
                used.append(axis)
                continue
            if part > 1:
                factors[axis] = part
                used.append(f"{axis}_major")
            break
        split.append(tuple(used))
    names: list[str] = []
    sizes: list[int] = []
    for name, part in factors.items():
        whole = mesh.shape[name]
        names += [name] if part == whole else [f"{name}_major", f"{name}_minor"]
        sizes += [whole] if part == whole else [part, whole // part]
    cut_mesh = jax.sharding.Mesh(np.reshape(mesh.devices, sizes), names)
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in split))
    return jax.sharding.NamedSharding(cut_mesh, spec)
