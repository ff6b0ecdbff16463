"""Executables: the compiled programs of one model on its devices."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.inference.programs.program_key import ProgramKey
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program

# Returns the program of a key: lowers it, or reads it from a file.
ProgramSource = Callable[[ProgramKey], Program]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that can be called.

    Attributes:
      inputs: its arguments.
      call: takes one array for each input, and returns the outputs. Donated inputs are gone.
    """

    inputs: tuple[Array, ...]
    call: Callable[..., Sequence[jax.Array]]

    def inputs_of(self, prefix: str) -> list[Array]:
        """Returns the inputs whose paths start with `prefix` and a dot."""
        return [array for array in self.inputs if array.path.startswith(f"{prefix}.")]


class Executables:
    """Compiles programs when they are first needed. Threads may share it."""

    def __init__(self, source: ProgramSource, devices: Sequence[jax.Device]):
        """Prepares to compile.

        Args:
          source: gives the programs.
          devices: the devices of the programs' mesh, in its order.
        """
        self._source, self._devices = source, list(devices)
        self._lock = threading.Lock()
        self._lowering = threading.Lock()
        self._compiled: dict[ProgramKey, CompiledProgram] = {}
        self._under_way: dict[ProgramKey, threading.Lock] = {}
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """The number of programs compiled so far."""
        return len(self._compiled)

    @property
    def platform(self) -> str:
        """The platform of the devices, such as "cpu"."""
        return self._devices[0].platform

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return len(self._devices)

    def is_ready(self, key: ProgramKey) -> bool:
        """Returns whether a program is compiled."""
        return key in self._compiled

    def get(self, key: ProgramKey) -> CompiledProgram:
        """Returns a program, compiled now if it was not needed before."""
        found = self._compiled.get(key)
        if found:
            return found
        with self._lock:
            lock = self._under_way.setdefault(key, threading.Lock())
        with lock:
            if key not in self._compiled:
                started = time.monotonic()
                self._compiled[key] = self._compile(key)
                self.seconds += time.monotonic() - started
        return self._compiled[key]

    def mesh(self, program: Program) -> jax.sharding.Mesh:
        """Returns the mesh of a program's devices."""
        return jax.sharding.Mesh(program.mesh.arrange(self._devices), program.mesh.names)

    def _compile(self, key: ProgramKey) -> CompiledProgram:
        # TensorFlow traces, and jax switches to 64 bits, for one thread at a time.
        with self._lowering:
            program = self._source(key)
            lowered = program.lower(self._devices)
        call: Any = lowered.compile()
        return CompiledProgram(program.inputs, call)
