"""Watches what the programs of a run cost to compile, and says why one was compiled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core import processes, tf
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import Compilation, compilations
from lingvo_gshard.training import MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.services import run_records
from lingvo_gshard.wings.services.run_options import CHOICES

# The shapes that batches are declared to have, one dict for each.
DeclaredBatches: TypeAlias = "Sequence[Mapping[str, tf.TensorSpec]]"

# The file in a log directory that has a row for each compilation.
COMPILATIONS_FILE = "compilations.jsonl"
# The functions whose inputs are batches; others have inputs of many shapes by design.
_ON_BATCHES = ("train", "eval")
_MOST_WARNINGS = 5


class CompilationLog(StepObserver):
    """Shows and writes what the programs of a run cost to compile, and explains unexpected ones."""

    def __init__(self, run: ObservedRun):
        self._run, self._started = run, 0
        self._programs: dict[str, list[Compilation]] = {}
        self._warnings = 0

    def before_step(self, step: int, batch: Batch) -> None:
        """Notes which step the next programs are compiled for."""
        self._started = step

    def after_start(self, step: int) -> None:
        """Adds the program that the step has compiled, if it has compiled one."""
        self._add()

    def record(self, step: int, row: MetricsRow) -> None:
        """Adds the programs of an evaluation."""
        self._add()

    def finish(self) -> None:
        """Shows a line for each function that was compiled."""
        for line in self.totals():
            self._run.say(line)

    def _add(self) -> None:
        """Shows and writes what was compiled since the last call."""
        run: Any = self._run
        known = {id(one) for programs in self._programs.values() for one in programs}
        for compilation in [one for one in run.runtime.compilations if id(one) not in known]:
            if compilation.function == "train":
                run.say(f"step {self._started:,}  {compilation.words()}")
            warning = self.add(self._started, compilation)
            if warning:
                run.say(warning)
            if processes.is_main():
                self._write(compilation)

    def _write(self, compilation: Compilation) -> None:
        """Appends the row of a compilation to compilations.jsonl, also when a run resumes."""
        row = {"step": self._started, **compilation.record()}
        try:
            run_records.append_row(self._run.logdir.path / COMPILATIONS_FILE, row)
        except OSError as error:
            self._run.say(f"Warning: {COMPILATIONS_FILE} cannot be written ({error.strerror})")

    def add(self, step: int, compilation: Compilation) -> str:
        """Records a compilation for a step. Returns a warning to show, or '' if it was expected."""
        earlier = self._programs.setdefault(compilation.function, [])
        is_expected = self._is_expected(compilation, earlier)
        nearest = min(
            reversed(earlier), key=lambda one: len(_changes(one, compilation)), default=None
        )
        earlier.append(compilation)
        if is_expected or nearest is None:
            return ""
        self._warnings += 1
        if self._warnings > _MOST_WARNINGS:
            return ""
        return (
            f"Warning: step {step:,}: the {compilation.function} step was compiled again, in "
            f"{compilation.seconds:.1f} s: {', '.join(_changes(nearest, compilation))}. Give all "
            "batches one shape and type, or declare the others in the input's declared_batches"
        )

    def totals(self) -> list[str]:
        """Returns a line for each function that was compiled."""
        lines = [_sum(name, programs) for name, programs in self._programs.items()]
        hidden = self._warnings - _MOST_WARNINGS
        if hidden > 0:
            lines.append(f"Warning: {hidden:,} more compilations of other shapes or types")
        return lines

    def _is_expected(self, compilation: Compilation, earlier: Sequence[Compilation]) -> bool:
        """Returns whether it is the function's first program, or one of a declared shape."""
        if compilation.function not in _ON_BATCHES or not earlier:
            return True
        if any(not _changes(one, compilation) for one in earlier):
            # Each worker of local updates has a program of its own.
            return True
        input_ = self._run.input_
        declared = input_.declared_batches(input_.p)
        return _is_declared(compilation.inputs, declared) and any(
            _is_declared(one.inputs, declared) for one in earlier
        )


def _is_declared(inputs: compilations.Inputs, declared: DeclaredBatches) -> bool:
    # A step with choices to replay has another program than those without.
    inputs = {name: given for name, given in inputs.items() if not name.startswith(CHOICES)}
    return any(
        inputs.keys() == specs.keys()
        and all(
            specs[name].shape.is_compatible_with(shape) and specs[name].dtype.name == dtype
            for name, (shape, dtype) in inputs.items()
        )
        for specs in declared
    )


def _changes(before: Compilation, after: Compilation) -> list[str]:
    """Returns in words how the inputs of two programs differ."""
    words = compilations.input_words
    old, new = before.inputs, after.inputs
    changed = [
        f"input {name} changed from {words(old[name])} to {words(new[name])}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    added = [f"input {name}, {words(new[name])}, is new" for name in new if name not in old]
    return changed + added + [f"input {name} is missing" for name in old if name not in new]


def _sum(function: str, programs: Sequence[Compilation]) -> str:
    """Returns a line such as "compiled train: 1 program in 3.1 s (...)"."""
    count, cached = len(programs), sum(program.is_cached for program in programs)
    seconds = sum(program.seconds for program in programs)
    return (
        f"compiled {function}: {count:,} program{'s' * (count > 1)} in {seconds:.1f} s "
        f"({compilations.phases(programs)}; {cached:,} from the cache)"
    )
