"""Reads the dump of libtpu: the optimized program with its buffers, before any code.

libtpu writes a file after each stage. The optimized and scheduled program comes with XLA's buffer
assignment, from which libtpu decides whether the program fits. A file for the stage after that
exists only if it fits. Generating code for the program takes most of the time, and changes neither.
"""

from __future__ import annotations

import collections
import pathlib
from typing import Any

from lingvo_gshard.hlo.messages import HloProto

_BUFFERS = "*.after_optimizations.hlo.pb"
# Written once the program and its buffers are complete and fit.
_ACCEPTED = "*.after_optimizations_after_buffer_assignment.hlo.pb"
# XLA's memory space of a TPU's high-bandwidth memory. Others are memories within a core.
_HBM = 0


def options(directory: str) -> dict[str, Any]:
    """Returns the compiler's options that write these files to a directory."""
    return {
        "xla_dump_to": directory,
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_as_text": False,
    }


def is_accepted(directory: str) -> bool:
    """Returns whether the compiler has finished the program and its buffers, and they fit."""
    return any(pathlib.Path(directory).glob(_ACCEPTED))


def read(directory: str, code: int) -> tuple[bytes, dict[str, int]]:
    """Returns the program of one device, a serialized HloModuleProto, and its memory.

    An executable's own report of its memory (`memory_bytes`) counts the gaps between temporaries
    twice. The sum of the buffers is what libtpu compares with a device's memory: the bytes that it
    reports when it refuses a program.

    Args:
      directory: the compiler's files; `is_accepted`.
      code: bytes of the device's code.

    Returns:
      the program, and the bytes of arguments, outputs, temporaries, code and their peak.
    """
    (path,) = pathlib.Path(directory).glob(_BUFFERS)
    proto = HloProto.FromString(path.read_bytes())
    sizes = collections.Counter({"arguments": 0, "outputs": 0, "temporaries": 0, "code": code})
    for buffer in proto.buffer_assignment.buffer_allocations:
        if buffer.color == _HBM:
            sizes[_kind(buffer)] += buffer.size
    return proto.hlo_module.SerializeToString(), {**sizes, "peak": sizes.total()}


def _kind(buffer: Any) -> str:
    """Returns the class of a buffer. An output in an argument's memory counts as an argument.

    Args:
      buffer: a BufferAllocationProto.
    """
    if buffer.is_entry_computation_parameter:
        return "arguments"
    return "outputs" if buffer.maybe_live_out else "temporaries"
