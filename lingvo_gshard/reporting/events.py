"""Events of a run besides its steps: compilations, and steps that were not as others."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard.training.run.monitoring.compilations import COMPILATIONS_FILE
from lingvo_gshard.training.run.records import json_lines
from lingvo_gshard.training.run.records.launch import Launch

_TRAIN = "train"


class CompiledProgram(msgspec.Struct, frozen=True):
    """A program that a run compiled; fields as in `Compilation`.

    Attributes:
      step: the step that it was compiled for.
    """

    step: int
    function: str
    inputs: dict[str, str]
    tracing: float
    lowering: float
    compiling: float
    is_cached: bool = False
    memory: dict[str, int] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the call to the compiled program."""
        return self.tracing + self.lowering + self.compiling


class Recompilation(msgspec.Struct, frozen=True):
    """A training step that was compiled after others had been taken.

    Attributes:
      step: the step that waited for it.
      seconds: seconds that it took.
      changes: the inputs that differ from those of the program before, in words.
    """

    step: int
    seconds: float
    changes: list[str]


def read_programs(logdir: pathlib.Path) -> list[CompiledProgram]:
    """Returns the programs that a run compiled, in order; none if that was not recorded."""
    return json_lines.read(logdir / COMPILATIONS_FILE, CompiledProgram)


def recompilations(
    programs: Sequence[CompiledProgram], launches: Iterable[Launch]
) -> list[Recompilation]:
    """Returns the training steps that were compiled again in the middle of a run.

    The first step after a start is always compiled.

    Args:
      programs: all programs of a run, in order.
      launches: how the run was started and resumed.
    """
    trained = [program for program in programs if program.function == _TRAIN]
    starts = {launch.step + 1 for launch in launches} or {one.step for one in trained[:1]}
    found, before = [], {}
    for program in trained:
        if program.step not in starts:
            changes = _changes(before, program.inputs)
            found.append(Recompilation(program.step, program.seconds, changes))
        before = program.inputs
    return found


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [
        f"{name}: {before.get(name, 'missing')} became {after.get(name, 'missing')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
