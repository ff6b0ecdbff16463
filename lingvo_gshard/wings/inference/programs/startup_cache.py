"""Fingerprints: what a compiled program depends on besides the model.

    model.json           what the host knows of the model; names and layouts of the weights
    weights.safetensors  the decoding weights
    KEY.program          a compiled program for each ProgramKey

Files are written atomically and checked when they are read. A file that is missing, damaged or of
another user is as good as none: what it held is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import platform
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import safetensors.numpy

from lingvo_gshard.core import Device, UserError, cached, is_bucket, jax, jnp, write_atomically
from lingvo_gshard.core.lazy import serialize_executable
from lingvo_gshard.runtime import Array, standard_error
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.programs.executables import DecodingExecutable, ProgramKey

_PACKAGE = pathlib.Path(__file__).parents[3]
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
# Lines of /proc/cpuinfo that say which instructions a compiler may use.
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


def fingerprint(facts: object) -> str:
    """Returns a hash of facts: values that JSON has."""
    encoded = msgspec.json.encode(facts, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]


def environment(devices: Iterable[str]) -> dict[str, object]:
    """Returns what compiled programs depend on: the machine, libraries, this package's code."""
    return {
        "cpu": _cpu(),
        "devices": list(devices),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "python": sys.version_info[:2],
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "code": code_stamp([_PACKAGE]),
    }


def code_stamp(roots: Iterable[pathlib.Path]) -> str:
    """Returns a hash of the name, size and time of every Python file in directories or files."""
    stamp = hashlib.sha256()
    for root in sorted(roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            found = path.stat()
            stamp.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return stamp.hexdigest()


@functools.cache
def _cpu() -> str:
    """Returns the processor's model and features, one line each."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *(x for x in lines if x.startswith(_CPU_LINES))])


_MODEL, _WEIGHTS = "model.json", "weights.safetensors"
_PROGRAM = ".program"


class _Record(msgspec.Struct, frozen=True):
    """The content of model.json; `checksums` has the CRC-32 of the bytes of each weight."""

    logdir: str
    facts: ModelFacts
    weights: tuple[Array, ...]
    checksums: tuple[int, ...]


class CacheEntry:
    """One model in the cache. Errors of the disk never reach the caller."""

    def __init__(self, path: pathlib.Path):
        """Names an entry. `write_model` creates its directory."""
        self.path = path

    def read_model(self, mesh: jax.sharding.Mesh) -> tuple[ModelFacts, list[jax.Array]] | None:
        """Returns what the host knows of the model, and its decoding weights; None if unusable."""
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
        self, logdir: str, facts: ModelFacts, arrays: Sequence[Array], weights: Sequence[jax.Array]
    ) -> None:
        """Writes what `read_model` returns."""
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

    def read_program(self, key: ProgramKey, devices: Sequence[Device]) -> DecodingExecutable | None:
        """Returns a compiled program, loaded to devices; None if there is none that is usable."""
        try:
            pickled = cached.checked_content(self._read(_file_of(key)))
            inputs, outputs, serialized = pickle.loads(pickled)
            # XLA notes that it compiled with preferences that are no features of a processor.
            with standard_error.hide():
                call = serialize_executable.deserialize_and_load(
                    *serialized, backend=devices[0].client, execution_devices=list(devices)
                )
        except Exception:  # As above; XLA adds its own types.
            return None
        return DecodingExecutable(inputs, outputs, call)

    def write_program(self, key: ProgramKey, compiled: DecodingExecutable) -> None:
        """Writes what `read_program` returns, where the platform can serialize programs."""
        try:
            serialized = serialize_executable.serialize(compiled.call)
            pickled = pickle.dumps((compiled.inputs, compiled.outputs, serialized))
            write_atomically(str(self.path / _file_of(key)), cached.with_digest(pickled))
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


# Entries used longest ago are removed when all together have more bytes.
MOST_BYTES = 8 * 2**30
# Nothing else in the directory is touched.
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")


def find_entry(directory: str, owner: object, content: object) -> CacheEntry:
    """Returns the entry of a model, which may not exist yet.

    Args:
      owner: JSON values that name the run and how it is decoded. An owner has one entry.
      content: JSON values that all of the entry depends on.
    """
    name = f"{fingerprint(owner)}-{fingerprint(content)}"
    return CacheEntry(pathlib.Path(directory) / name)


def prune(entry: CacheEntry, most_bytes: int = MOST_BYTES) -> None:
    """Removes entries that nobody needs: older entries of the owner, and entries of deleted runs.

    If the remaining entries have too many bytes together, the entries used longest ago are removed,
    too.
    """
    owner = entry.path.name.partition("-")[0]
    others = []
    with contextlib.suppress(OSError):
        others = [p for p in entry.path.parent.iterdir() if _NAME.fullmatch(p.name)]
    total = _size(entry.path)
    for path in sorted(others, key=cached.last_used, reverse=True):
        if path == entry.path:
            continue
        is_replaced = path.name.startswith(f"{owner}-")
        size = _size(path)
        if is_replaced or total + size > most_bytes or CacheEntry(path).is_stale:
            shutil.rmtree(path, ignore_errors=True)
        else:
            total += size


def _size(path: pathlib.Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in path.rglob("*"))
    return 0
