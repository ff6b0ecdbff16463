"""MeshState: a model's variables on the devices of a mesh, and their copies in Keras."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lingvo_gshard.core.lazy import jax, multihost_utils
from lingvo_gshard.runtime import Array, HeldVariable

# Variables of at most so many elements are compared before every step, so that a callback may set
# them at any time: learning rates, counters, metrics, seeds.
_SMALL = 1024


class MeshState:
    """The values of variables on devices, and what is known of the variables in Keras.

    A step reads and writes the values on the devices only. `pull` copies them into the variables,
    for callbacks and for what comes after training. `push_changes` copies variables that Keras or
    a callback has set since then.

    Attributes:
      arrays: path -> shape, dtype and layout.
    """

    def __init__(self, held: Sequence[HeldVariable], mesh: jax.sharding.Mesh):
        """Copies all variables to the devices."""
        self.arrays: dict[str, Array] = {each.array.path: each.array for each in held}
        self._variables = {each.array.path: each.variable for each in held}
        self._mesh = mesh
        self._values: dict[str, jax.Array] = {}
        self._known: dict[str, bytes] = {}
        self._is_stale: set[str] = set()
        self.push_changes()

    def values(self, paths: Iterable[str]) -> list[jax.Array]:
        """Returns the values on the devices. A step donates their memory."""
        return [self._values[path] for path in paths]

    def set_values(self, paths: Sequence[str], values: Sequence[jax.Array]) -> None:
        """Sets the values that a step has returned."""
        self._values.update(zip(paths, values, strict=True))
        self._is_stale.update(paths)

    def sharding(self, path: str) -> jax.sharding.NamedSharding:
        """Returns the layout of a variable over the devices."""
        return self.arrays[path].known_sharding(self._mesh)

    def scalars(self, part: str) -> dict[str, float]:
        """Returns the numbers of a part of the state, by the last part of their paths."""
        return {
            _name(path): self._values[path].addressable_data(0).item()
            for path, array in self.arrays.items()
            if path.startswith(f"{part}.") and not array.shape
        }

    def set_by_callbacks(self, part: str, before: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Returns path -> number in Keras where it differs from `before`, a result of `scalars`."""
        found = {}
        for path, variable in self._variables.items():
            is_scalar = not self.arrays[path].shape
            if is_scalar and path.startswith(f"{part}.") and _name(path) in before:
                value = variable.numpy()
                if value != np.asarray(before[_name(path)], value.dtype):
                    found[path] = value
        return found

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets variables in Keras, which `push_changes` then copies."""
        for path, value in values.items():
            self._variables[path].assign(value)

    def restore(self, values: Mapping[str, jax.Array]) -> None:
        """Sets the values of a checkpoint, in the layouts of `arrays`, here and in Keras."""
        paths = list(self.arrays)
        restored = [self.arrays[path].put(values[path], self._mesh, True) for path in paths]
        self.set_values(paths, restored)
        self.pull()

    def push_changes(self, only_small: bool = False) -> None:
        """Copies the variables that were set since they were last equal to the devices' values.

        Args:
          only_small: leaves out variables of many elements, whose comparison takes time.
        """
        for path, variable in self._variables.items():
            if only_small and math.prod(self.arrays[path].shape) > _SMALL:
                continue
            value = variable.numpy()
            digest = _digest(value)
            if self._known.get(path) != digest:
                self._values[path] = self.arrays[path].put(value, self._mesh, is_donated=True)
                self._known[path] = digest
                self._is_stale.discard(path)

    def push(self, prefix: str) -> None:
        """Copies the variables whose paths begin with a prefix, whether they were set or not."""
        for path in self.arrays:
            if path.startswith(prefix):
                self._known.pop(path, None)
        self.push_changes()

    def pull(self, prefix: str = "") -> None:
        """Copies what steps have changed into the variables whose paths begin with `prefix`.

        In a cluster every process calls this at the same time.
        """
        for path in [path for path in self.arrays if path in self._is_stale]:
            if path.startswith(prefix):
                value = _on_host(self._values[path])
                self._variables[path].assign(value)
                self._known[path] = _digest(value)
                self._is_stale.discard(path)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _on_host(value: jax.Array) -> np.ndarray:
    """Returns an array in the memory of the host, in every process."""
    if value.is_fully_addressable:
        return np.asarray(value)
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def _digest(value: np.ndarray) -> bytes:
    return hashlib.blake2b(value.tobytes(), digest_size=16).digest()
