"""Programs compiled for a topology, and the cache that keeps them on disk for later plans.

A file holds a SHA-256 of its content and the compressed content. The cache writes files atomically,
and checks a file before use. The cache removes a file that is damaged or has another format; the
program is then compiled again.

Compilers write a file after each stage. The optimized and scheduled program comes with XLA's buffer
assignment. libtpu reads the buffer assignment to decide whether the program fits the chip, and
writes the file of the next stage only if the program fits. That next stage generates code, which
takes most of the time and changes neither the program nor the buffer assignment. XLA's compiler for
GPUs writes a report of the memory next, whether the program fits or not.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import zlib
from typing import Any

import msgspec

from lingvo_gshard.core import cached, context, objects, write_atomically
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo.host_transfers import HOST_SPACE
from lingvo_gshard.wings.hlo.messages import HloProto

# Files used longest ago are removed when all together have more bytes.
MOST_BYTES = 2 * 2**30
# Programs that compile faster are not worth a file.
_LEAST_SECONDS = 1.0
_SUFFIX = ".compiled"
# Nothing else in the directory is touched.
_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")


@dataclasses.dataclass
class CompilationCache:
    """Compiled programs in a directory. Errors of the disk never reach the caller.

    `most_bytes` limits the size of all files together. `read` and `compiled` count the programs
    that were found and that were not. `damaged` counts the damaged files.
    """

    directory: pathlib.Path
    most_bytes: int = MOST_BYTES
    read: int = 0
    compiled: int = 0
    damaged: int = 0

    def get(self, key: str) -> OptimizedHlo | None:
        """Returns a compiled program and counts the request; None if there is no usable file."""
        path = self._path(key)
        found = None
        try:
            packed = zlib.decompress(cached.checked_content(objects.read_bytes(path)))
            found = msgspec.msgpack.decode(packed, type=OptimizedHlo)
            os.utime(path)
        except (ValueError, zlib.error):
            self.damaged += 1
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError:  # Nothing there, or unreadable.
            pass
        self.read += found is not None
        self.compiled += found is None
        return found

    def put(self, key: str, program: OptimizedHlo) -> None:
        """Writes what `get` returns, and removes the files used longest ago if there are too many.

        Programs that were compiled in less than a second are left out.
        """
        if program.seconds < _LEAST_SECONDS:
            return
        packed = zlib.compress(msgspec.msgpack.encode(program), 1)
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(str(self._path(key)), cached.with_digest(packed))
            self._prune(self._path(key))

    def _path(self, key: str) -> pathlib.Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _prune(self, newest: pathlib.Path) -> None:
        """Removes files used longest ago until the rest is small enough. The newest one stays."""
        files = [p for p in self.directory.iterdir() if _NAME.fullmatch(p.name) and p != newest]
        total = newest.stat().st_size
        for path in sorted(files, key=cached.last_used, reverse=True):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > self.most_bytes:
                    path.unlink()


class OptimizedHlo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The optimized HLO of a program that was compiled for a topology, and its memory.

    The cache's files have these fields.

    Attributes:
      proto: the program of one device, a serialized HloModuleProto.
      memory: bytes per device by class, as runtime.program.memory_bytes returns them.
      full_replications: tensors that the partitioner replicates in full to reshard them.
      refused: whether the chip's own compiler reported that the program does not fit, so that it
        was compiled for another chip with more memory.
      note: an explanation for the user if the program was refused; else empty.
      has_code: whether the compiler generated the device's code. If not, `memory` has no bytes of
        code, and `seconds` lacks the time to generate it.
    """

    proto: bytes
    memory: dict[str, int]
    seconds: float
    full_replications: list[hlo.FullReplication]
    refused: bool = False
    note: str = ""
    has_code: bool = True

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The program of one device."""
        return hlo.Module.from_bytes(self.proto)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the planner's compilations. Without a cache, every program is compiled.

    A plan reads the optimized program and its memory, which are ready before code is generated.
    """

    cache: CompilationCache | None = None
    generates_code: bool = False


_settings = context.Scope("settings", Settings())


def current_settings() -> Settings:
    """Returns the settings that hold here."""
    return _settings.get()


def using_settings(settings: Settings) -> contextlib.AbstractContextManager[Settings]:
    """Has plans inside a `with` block compile with these settings."""
    return _settings.use(settings)


_BUFFERS = "*[._]after_optimizations.hlo.pb"
# Compilers write these files when the program and its buffers are complete: libtpu if they fit.
_ACCEPTED = (
    "*.after_optimizations_after_buffer_assignment.hlo.pb",
    "*_gpu_after_optimizations-memory-usage-report.pb",
)
# XLA's memory space of a chip's high-bandwidth memory. Others are memories within a core.
_HBM = 0


def options(directory: str) -> dict[str, Any]:
    """Returns the compiler's options that write these files to a directory."""
    return {"xla_dump_to": directory, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": False}


def is_accepted(directory: str) -> bool:
    """Returns whether the program and its buffers are finished; for TPUs, also that they fit."""
    return any(any(pathlib.Path(directory).glob(name)) for name in _ACCEPTED)


def read(directory: str, code: int) -> tuple[bytes, dict[str, int]]:
    """Returns the program of one device, a serialized HloModuleProto, and its bytes by class.

    An executable's own report of memory (`memory_bytes`) counts the gaps between temporaries twice.
    libtpu compares the sum of the buffers with a device's memory, and reports this sum when it
    refuses a program. The compiler must have accepted the program (`is_accepted`).
    """
    (path,) = pathlib.Path(directory).glob(_BUFFERS)
    proto = HloProto.FromString(objects.read_bytes(path))
    sizes = collections.Counter({"arguments": 0, "outputs": 0, "temporaries": 0, "code": code})
    host = 0
    for buffer in proto.buffer_assignment.buffer_allocations:
        if buffer.color == _HBM:
            sizes[_kind(buffer)] += buffer.size
        elif buffer.color == HOST_SPACE:
            host += buffer.size
    memory = {**sizes, "peak": sizes.total(), "host": host}
    return proto.hlo_module.SerializeToString(), memory


def _kind(buffer: Any) -> str:
    """Returns the class of a BufferAllocationProto; an output in an argument's memory is one."""
    if buffer.is_entry_computation_parameter:
        return "arguments"
    return "outputs" if buffer.maybe_live_out else "temporaries"
