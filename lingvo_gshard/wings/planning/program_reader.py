"""Reads compiled programs for runtimes, as plans read them."""

from __future__ import annotations

from collections.abc import Iterable

from lingvo_gshard.core import jax
from lingvo_gshard.runtime import PROGRAM_READERS, Executable
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo import names


class HloReader:
    """Returns what folder hlo reads of an executable; see `executable.ProgramReader`."""

    def module(self, compiled: jax.stages.Compiled) -> hlo.Module:
        """Returns the program of one device as data."""
        return hlo.read_module(compiled)

    def proto(self, compiled: jax.stages.Compiled) -> bytes:
        """Returns the program of one device as a serialized HloModuleProto."""
        return hlo.read_proto(compiled)

    def operations(self, executable: Executable, layers: Iterable[str] | None) -> hlo.OperationList:
        """Returns the operations that one device executes, as `hlo.read_operations` does."""
        return hlo.read_operations(executable.hlo_module(), executable.program.mesh, layers)

    def collectives(
        self, executable: Executable, layers: Iterable[str] | None
    ) -> list[hlo.CollectiveCall]:
        """Returns the collectives in the program of one device."""
        return hlo.collective_calls(self.operations(executable, layers).operations)

    def collectives_in_words(self, executable: Executable) -> str:
        """Returns the collectives by kind, such as "4 all-reduce (12 per step)"."""
        calls = self.collectives(executable, None)
        in_program, per_step = hlo.count_by_kind(calls), hlo.count_per_step(calls)
        parts = [
            f"{count} {kind}"
            + (f" ({per_step[kind]:,} per step)" if per_step[kind] != count else "")
            for kind, count in sorted(in_program.items())
        ]
        return ", ".join(parts) or "none"

    def full_replications(self, executable: Executable) -> list[hlo.FullReplication]:
        """Returns the tensors that the partitioner could only reshard by replicating them."""
        return names.full_replications(executable.compiler_output)


PROGRAM_READERS.register("hlo")(HloReader())
