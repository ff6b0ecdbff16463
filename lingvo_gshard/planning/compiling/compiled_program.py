"""CompiledProgram: what the planner reads of a program that was compiled for a topology."""

from __future__ import annotations

import dataclasses
import functools

from lingvo_gshard import hlo


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for a topology.

    Attributes:
      proto: the program of one device, a serialized HloModuleProto.
      memory: bytes per device by class, as runtime.program.memory_bytes returns them.
      seconds: compile time.
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
