"""CacheEntry: one model as its decoder needs it, in a directory of the cache.

    model.json           what the host knows of the model; names and layouts of the weights
    weights.safetensors  the decoding weights
    KEY.program          a compiled program for each ProgramKey

Files are written atomically and checked when they are read. A file that is missing, damaged or of
another user is as good as none: what it held is computed again.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import tempfile
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import safetensors.numpy

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files.atomic import write_atomically
from lingvo_gshard.core.files.cached import checked_content, with_digest
from lingvo_gshard.core.files.paths import is_bucket
from lingvo_gshard.core.lazy import Device, jax, jnp, serialize_executable
from lingvo_gshard.decoding.model_facts import ModelFacts
from lingvo_gshard.inference.programs.compiled_program import CompiledProgram
from lingvo_gshard.inference.programs.program_key import ProgramKey
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.runtime.program.array import Array

_MODEL, _WEIGHTS = "model.json", "weights.safetensors"
_PROGRAM = ".program"


class _Record(msgspec.Struct, frozen=True):
    """The content of model.json.

    Attributes:
      logdir: the run.
      facts: what the host knows of the model.
      weights: the decoding weights, in order.
      checksums: the CRC-32 of the bytes of each.
    """

    logdir: str
    facts: ModelFacts
    weights: tuple[Array, ...]
    checksums: tuple[int, ...]


class CacheEntry:
    """One model in the cache. Errors of the disk never reach the caller.

    Attributes:
      path: its directory.
    """

    def __init__(self, path: pathlib.Path):
        """Names an entry. `write_model` creates its directory."""
        self.path = path

    def read_model(self, mesh: jax.sharding.Mesh) -> tuple[ModelFacts, list[jax.Array]] | None:
        """Returns what the host knows of the model, and its decoding weights; None if unusable.

        Args:
          mesh: the devices that the weights go to.
        """
        try:
            record = self._record()
            _check_owner(self.path / _WEIGHTS)
            values = safetensors.numpy.load_file(self.path / _WEIGHTS)
            arrays = []
            for array, checksum in zip(record.weights, record.checksums, strict=True):
                value = values[array.path]
                if zlib.crc32(value.data) != checksum:
                    return None
                value = value.view(jnp.dtype(array.dtype)).reshape(array.shape)
                arrays.append(array.put(value, mesh))
            os.utime(self.path)
        except Exception:  # Damaged files raise errors of many types.
            return None
        return record.facts, arrays

    @property
    def is_stale(self) -> bool:
        """Whether the entry is damaged, or the local directory of its run is gone."""
        try:
            record = self._record()
        except (OSError, ValueError):
            return True
        return not is_bucket(record.logdir) and not os.path.isdir(record.logdir)

    def write_model(
        self,
        logdir: str,
        facts: ModelFacts,
        arrays: Sequence[Array],
        weights: Sequence[jax.Array],
    ) -> None:
        """Writes what `read_model` returns.

        Args:
          logdir: the directory of the run.
          facts: what the host knows of the model.
          arrays: names and layouts of the weights.
          weights: the decoding weights.
        """
        values = {a.path: _as_bytes(x) for a, x in zip(arrays, weights, strict=True)}
        checksums = tuple(zlib.crc32(value.data) for value in values.values())
        record = _Record(logdir, facts, tuple(arrays), checksums)
        try:
            # Only this user: programs are code.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".partial-") as directory:
                unfinished = pathlib.Path(directory) / _WEIGHTS
                safetensors.numpy.save_file(values, unfinished)
                unfinished.replace(self.path / _WEIGHTS)
            write_atomically(str(self.path / _MODEL), msgspec.json.encode(record))
        except (OSError, safetensors.SafetensorError):
            return

    def program_names(self) -> frozenset[str]:
        """Returns the keys of the programs that are there, as texts."""
        return frozenset(
            file.name.removesuffix(_PROGRAM) for file in self.path.glob(f"*{_PROGRAM}")
        )

    def read_program(self, key: ProgramKey, devices: Sequence[Device]) -> CompiledProgram | None:
        """Returns a compiled program, loaded to devices; None if there is none that is usable."""
        try:
            pickled = checked_content(self._read(_file_of(key)))
            inputs, outputs, serialized = pickle.loads(pickled)
            # XLA notes that it compiled with preferences that are no features of a processor.
            with standard_error.hide():
                call = serialize_executable.deserialize_and_load(
                    *serialized, backend=devices[0].client, execution_devices=list(devices)
                )
        except Exception:  # As above; XLA adds its own types.
            return None
        return CompiledProgram(inputs, outputs, call)

    def write_program(self, key: ProgramKey, compiled: CompiledProgram) -> None:
        """Writes what `read_program` returns, where the platform can serialize programs."""
        try:
            serialized = serialize_executable.serialize(compiled.call)
            pickled = pickle.dumps((compiled.inputs, compiled.outputs, serialized))
            write_atomically(str(self.path / _file_of(key)), with_digest(pickled))
        except Exception:  # Not every backend can; the program is then compiled at every start.
            return

    def _record(self) -> _Record:
        return msgspec.json.decode(self._read(_MODEL), type=_Record)

    def _read(self, name: str) -> bytes:
        _check_owner(self.path / name)
        return (self.path / name).read_bytes()


def _file_of(key: ProgramKey) -> str:
    return f"{key}{_PROGRAM}"


def _check_owner(path: pathlib.Path) -> None:
    """Raises ValueError if another user wrote a file: loading a program runs its code."""
    if path.stat().st_uid not in (os.getuid(), 0):
        raise UserError(f"{path} belongs to another user")


def _as_bytes(array: jax.Array) -> np.ndarray:
    """Returns an array's bytes, uint8: safetensors' NumPy interface lacks bfloat16."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
