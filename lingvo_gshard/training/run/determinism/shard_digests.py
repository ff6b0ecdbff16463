"""Digests of what each device holds of each array of a state.

A shard is read as unsigned words w_i in C order. Its digest is the sum of w_i (2 i + 1) mod 2^32,
computed on its device. A change of a single word always changes it, because 2 i + 1 is odd.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core.lazy import Device, jax, jnp
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run import processes

# The device of arrays that are on the host.
HOST = "the device"
# Path of an array -> device -> digest of the device's shard.
Digests: TypeAlias = "dict[str, dict[str, int]]"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that is not on a device what it should be.

    Attributes:
      path: path of the tensor in the state.
      device: the device, in words.
    """

    path: str
    device: str


def shard_digests(state: NestedMap) -> Digests:
    """Returns the digests of a state. In a cluster all processes make this call.

    Args:
      state: a tree of NumPy arrays or jax.Arrays.
    """
    own: Digests = {}
    on_mesh: dict[Any, dict[str, jax.Array]] = {}
    for path, array in state.flatten_items():
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)
        if mesh is not None:
            on_mesh.setdefault(mesh, {})[path] = array
        elif processes.is_main():
            own[path] = {HOST: _on_host(np.asarray(array))}
    for mesh, arrays in on_mesh.items():
        own.update(_on_devices(mesh, arrays))
    found: Digests = {}
    for part in processes.gather(own):
        for path, digests in part.items():
            found.setdefault(path, {}).update(digests)
    return found


def differences(one: Digests, other: Digests) -> list[Difference]:
    """Returns the shards whose digests differ between two states."""
    return [
        Difference(path, device)
        for path, digests in one.items()
        for device, value in digests.items()
        if other[path][device] != value
    ]


def unequal_copies(state: NestedMap, found: Digests) -> list[Difference]:
    """Returns the copies of a part of an array that differ from most of the others.

    Args:
      state: the state.
      found: its digests.
    """
    wrong = []
    for path, array in state.flatten_items():
        for devices in _devices_of_parts(array):
            copies = {device: found[path][device] for device in devices}
            values = list(copies.values())
            usual = max(values, key=values.count)
            wrong += [Difference(path, device) for device in devices if copies[device] != usual]
    return wrong


def words(found: Sequence[Difference], device_count: int) -> str:
    """Returns differences in words, by device."""
    by_device: dict[str, list[str]] = {}
    # Weights say more than moments.
    for one in sorted(found, key=lambda one: not one.path.startswith("theta.")):
        by_device.setdefault(one.device, []).append(one.path)
    parts = []
    for device, paths in list(by_device.items())[:4]:
        more = f" and {len(paths) - 3:,} more tensors" if len(paths) > 3 else ""
        parts.append(f"{device}: {', '.join(paths[:3])}{more}")
    if len(by_device) > 4:
        parts.append(f"and {len(by_device) - 4:,} more devices")
    if 1 < device_count == len(by_device):
        parts.append("these are all devices, so a collective may have passed a wrong value on")
    return "; ".join(parts)


def _devices_of_parts(array: Any) -> list[list[str]]:
    """Returns for each part of an array the devices that hold it."""
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return []
    parts: dict[Any, list[str]] = {}
    for device, index in sharding.devices_indices_map(array.shape).items():
        key = tuple((part.start, part.stop) for part in index)
        parts.setdefault(key, []).append(_name(device))
    return list(parts.values())


def _on_devices(mesh: jax.sharding.Mesh, arrays: Mapping[str, Any]) -> Digests:
    """Returns the digests of the shards on this process's devices."""
    specs = tuple(array.sharding.spec for array in arrays.values())
    rows = _digest_program(mesh, specs)(*arrays.values())
    found: Digests = {path: {} for path in arrays}
    for shard in rows.addressable_shards:
        for path, value in zip(arrays, np.asarray(shard.data)[0].tolist(), strict=True):
            found[path][_name(shard.device)] = value
    return found


@functools.cache
def _digest_program(mesh: jax.sharding.Mesh, specs: tuple) -> Any:
    """Returns a program that maps arrays to uint32 [devices, arrays]."""

    def on_device(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_digest(shard) for shard in shards])[None]

    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    # Copies that differ are what is looked for, so nothing may be assumed to be replicated.
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return jax.jit(mapped)


def _digest(shard: jax.Array) -> jax.Array:
    if shard.dtype == bool:
        shard = shard.astype(jnp.uint8)
    width = shard.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(shard, jnp.dtype(f"uint{width}"))
    flat = bits.astype(jnp.uint32).reshape(-1)
    weights = 2 * jax.lax.iota(jnp.uint32, flat.size) + 1
    return jnp.sum(flat * weights, dtype=jnp.uint32)


def _on_host(array: np.ndarray) -> int:
    width = min(array.dtype.itemsize, 4)
    flat = np.ascontiguousarray(array).reshape(-1).view(f"<u{width}").astype(np.uint32)
    weights = 2 * np.arange(flat.size, dtype=np.uint32) + np.uint32(1)
    return int(np.sum(flat * weights, dtype=np.uint32))


def _name(device: Device) -> str:
    kind = device.platform.upper() if device.platform != "gpu" else "GPU"
    return f"{kind} device {device.id} (process {device.process_index})"
