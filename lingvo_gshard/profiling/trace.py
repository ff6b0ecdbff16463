"""Traces as data: what each device executed and what the host did. Times are in picoseconds."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.hlo.module import Module

# Names of our own spans on the host's main thread. XProf divides a trace by spans named "train".
STEP, INPUT = "train", "wait for input"
# Of a program that was executed, the HLO has at least this share of the instructions.
_LEAST_COVERAGE = 0.5


class Event(NamedTuple):
    """One execution of an operation on a device.

    Attributes:
      program: key of the program in `Trace.programs`.
      operation: name of the HLO instruction.
      start: when it started.
      end: when its result was there.
      thread: the host's thread or the accelerator's stream.
    """

    program: str
    operation: str
    start: int
    end: int
    thread: str = ""


class Span(NamedTuple):
    """A piece of work of the host's main thread.

    Attributes:
      name: `STEP` or `INPUT`; other names are those of libraries.
      start: when it started.
      end: when it ended.
      step: number of the training step; None for spans of libraries.
    """

    name: str
    start: int
    end: int
    step: int | None = None


class Run(NamedTuple):
    """One execution of a program on a device, from its first operation to its last."""

    program: str
    start: int
    end: int


@dataclasses.dataclass
class Trace:
    """The events of a recorded trace.

    Attributes:
      devices: the executed operations of each device, by its number, in the order of their starts.
      runs: the executions of programs on each device.
      host: what the host's main thread did.
      programs: the serialized HloProto of each program, by its key.
    """

    devices: dict[int, list[Event]]
    runs: dict[int, list[Run]]
    host: list[Span]
    programs: dict[str, bytes]

    def spans(self, name: str) -> list[Span]:
        """Returns the host's spans of a name, in the order of their starts."""
        return sorted((span for span in self.host if span.name == name), key=lambda s: s.start)

    @functools.cached_property
    def window(self) -> tuple[int, int]:
        """Start of the first step and end of the last one.

        Raises:
          UserError: the trace has no steps.
        """
        steps = self.spans(STEP)
        if not steps:
            raise UserError("the trace has no training steps")
        return steps[0].start, max(span.end for span in steps)

    def module(self, program: str) -> Module | None:
        """Returns a compiled program as data; None if the trace does not have it.

        Executables that jax reads from its cache are executed under another number than their HLO
        has. The module is therefore the one that has most of the executed instructions.
        """
        executed = self.executed.get(program, set())
        found, most = None, _LEAST_COVERAGE * len(executed)
        for key, (module, names) in self._modules.items():
            covered = len(executed & names)
            if covered > most or (covered == most and key == program):
                found, most = module, covered
        return found

    @functools.cached_property
    def executed(self) -> dict[str, set[str]]:
        """The names of the executed instructions of each program."""
        names: dict[str, set[str]] = {}
        for events in self.devices.values():
            for event in events:
                names.setdefault(event.program, set()).add(event.operation)
        return names

    @functools.cached_property
    def _modules(self) -> dict[str, tuple[Module, frozenset[str]]]:
        """The programs as data, with the names of their instructions."""
        found = {}
        for key, serialized in self.programs.items():
            module = Module.from_hlo(serialized)
            names = frozenset().union(*(each.by_name for each in module.computations))
            found[key] = module, names
        return found
