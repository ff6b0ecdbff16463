"""Executable: a Program compiled for devices, with what the compiler said about it."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from lingvo_gshard.hlo import summary
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.runtime.program.compilation_cache import with_earlier_output
from lingvo_gshard.runtime.program.program import Program, memory_bytes, using_partitioner

# What the compiler says that needs no showing: that GSPMD will go one day, and what is reported.
_HIDDEN = ("GSPMD sharding propagation is going to be deprecated", summary.REMATERIALizED)


class Executable:
    """A compiled program, to be called with flat jax.Arrays.

    Raises ValueError if the devices do not fill the program's mesh, and, when called, if an array's
    memory has been taken over by an earlier call.
    """

    def __init__(self, program: Program, devices: Sequence[jax.Device]):
        self.program = program
        lowered = program.lower(devices)
        self._compiled, output = _compile(lowered, program.partitioner)
        self.compiler_output = with_earlier_output(program.digest, output)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        for spec, array in zip(self.program.inputs, arrays, strict=True):
            # jax would end the process.
            if isinstance(array, jax.Array) and array.is_deleted():
                raise ValueError(
                    f"{self.program.name}: the memory of {spec.path} was taken over by an earlier "
                    "call; its result holds the new value"
                )
        return self._compiled(*arrays)

    @property
    def input_shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """The layout of each input."""
        return tuple(self._compiled.input_shardings[0])

    @property
    def output_shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """The layout of each output, also of those that were left to the partitioner."""
        return tuple(self._compiled.output_shardings)

    def hlo(self) -> str:
        """Returns the text of the program of one device, collectives and all."""
        return self._compiled.as_text()

    def collectives(self) -> list[summary.Collective]:
        """Returns the collectives in the program of one device."""
        return summary.collectives(self.hlo())

    def memory(self) -> dict[str, int]:
        """Returns bytes per device: arguments, outputs, temporaries, code and peak."""
        return memory_bytes(self._compiled)

    def rematerializations(self) -> list[summary.Rematerialization]:
        """Returns the tensors that the partitioner could only reshard by making them whole."""
        return summary.rematerializations(self.compiler_output)


def _compile(lowered: jax.stages.Lowered, partitioner: str) -> tuple[jax.stages.Compiled, str]:
    """Compiles, and returns what the compiler wrote to standard error."""
    # Where TF_CPP_MIN_LOG_LEVEL leaves out warnings, the partitioner's would be lost.
    logged = jax.config.jax_logging_level
    jax.config.update("jax_logging_level", "WARNING")
    try:
        with standard_error.kept(_HIDDEN) as output, using_partitioner(partitioner):
            compiled = lowered.compile()
    finally:
        jax.config.update("jax_logging_level", logged)
    return compiled, output.text
