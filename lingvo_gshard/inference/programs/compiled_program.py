"""CompiledProgram: a program that can be called."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.runtime.program.array import Array


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that can be called.

    Attributes:
      inputs: its arguments.
      outputs: its results.
      call: a jax.stages.Compiled: takes one array for each input, and returns the outputs. Donated
        inputs are gone.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    call: Any

    def inputs_of(self, prefix: str) -> list[Array]:
        """Returns the inputs whose paths start with `prefix` and a dot."""
        return [array for array in self.inputs if array.path.startswith(f"{prefix}.")]
