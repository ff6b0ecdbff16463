"""Watches what the programs of a run cost to compile, and says why one was compiled again."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.training.run import run_records


def give_back() -> None:
    """Gives memory that was freed back to the system.

    XLA's compiler frees hundreds of megabytes in small pieces, which glibc would keep for later.
    """
    gc.collect()
    # Other C libraries lack the function, and keep less.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


# Name of an input -> (shape, dtype).
Inputs: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
# The shapes that batches are declared to have, one dict for each.
DeclaredBatches: TypeAlias = "Sequence[Mapping[str, tf.TensorSpec]]"

# The file in a log directory that has a row for each compilation.
COMPILATIONS_FILE = "compilations.jsonl"
# The functions whose inputs are batches; others have inputs of many shapes by design.
_ON_BATCHES = ("train", "eval")
_MOST_WARNINGS = 5


class _InProgress:
    count = 0


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Marks that a program is being compiled, which may take far longer than a step.

    Afterwards the compiler's memory is given back to the system.
    """
    _InProgress.count += 1
    try:
        yield
    finally:
        _InProgress.count -= 1
        give_back()


def is_compiling() -> bool:
    """Returns whether this process is compiling a program."""
    return _InProgress.count > 0


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program that a runtime compiled.

    Attributes:
      function: "init", "train", "eval", "routers" for a step that watches the routers, "outer" for
        the outer step of local updates, or "function" for a function bound to the weights.
      inputs: the inputs that distinguish programs of one function, such as the batch.
      tracing: seconds to run the function in Python.
      lowering: seconds to lower the trace to StableHLO for the devices.
      compiling: seconds to compile the program with XLA, or to read it from the cache.
      is_cached: whether the program was read from the cache on disk.
      memory: bytes per device by class, as XLA planned them; None if the runtime does not know.
    """

    function: str
    inputs: Inputs
    tracing: float
    lowering: float
    compiling: float
    is_cached: bool = False
    memory: Mapping[str, int] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the call to the compiled program."""
        return self.tracing + self.lowering + self.compiling

    def words(self) -> str:
        """Returns a line such as "compiled in 3.1 s (tracing 1.0 s, ...)"."""
        where = ", from the cache" if self.is_cached else ""
        return f"compiled in {self.seconds:.1f} s ({_phases([self])}{where})"

    def record(self) -> dict:
        """Returns the compilation as JSON values."""
        values = dataclasses.asdict(self)
        return values | {"inputs": {name: _words(pair) for name, pair in self.inputs.items()}}


class CompilationWatch:
    """Sums up the compilations of a run, and explains unexpected compilations."""

    def __init__(self, declared: Callable[[], DeclaredBatches]):
        """Makes the watch of one run.

        Args:
          declared: returns the shapes that batches may have; called when a second program of a
            function is compiled.
        """
        self._declared = declared
        self._programs: dict[str, list[Compilation]] = {}
        self._warnings = 0

    def new(self, compilations: Sequence[Compilation]) -> list[Compilation]:
        """Returns the compilations that were not added yet."""
        known = {id(one) for programs in self._programs.values() for one in programs}
        return [one for one in compilations if id(one) not in known]

    def add(self, step: int, compilation: Compilation) -> str:
        """Records a compilation. Returns a warning to show, or '' if it was expected.

        Args:
          step: the step that was compiled for.
          compilation: the compilation.
        """
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

    def summary(self) -> list[str]:
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
        declared = self._declared()
        return _is_declared(compilation.inputs, declared) and any(
            _is_declared(one.inputs, declared) for one in earlier
        )


def append_compilation(
    directory: pathlib.Path, step: int, compilation: Compilation, say: Callable[[str], None]
) -> None:
    """Appends the row of a compilation to compilations.jsonl, also when a run resumes.

    Args:
      directory: the run's directory.
      step: the step that was compiled for.
      compilation: the compilation.
      say: shows a line to the user if the file cannot be written.
    """
    try:
        row = {"step": step, **compilation.record()}
        run_records.append_row(directory / COMPILATIONS_FILE, row)
    except OSError as error:
        say(f"Warning: {COMPILATIONS_FILE} cannot be written ({error.strerror})")


def inputs_of(batch: Mapping[str, np.ndarray | tf.Tensor]) -> Inputs:
    """Returns shape and dtype of each array of a batch, by name in alphabetical order."""
    return {
        name: (tuple(known_sizes(tf.TensorShape(array.shape))), tf.as_dtype(array.dtype).name)
        for name, array in sorted(batch.items())
    }


def _is_declared(inputs: Inputs, declared: DeclaredBatches) -> bool:
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
    old, new = before.inputs, after.inputs
    changed = [
        f"input {name} changed from {_words(old[name])} to {_words(new[name])}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    added = [f"input {name}, {_words(new[name])}, is new" for name in new if name not in old]
    return changed + added + [f"input {name} is missing" for name in old if name not in new]


def _words(pair: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = pair
    return f"{dtype}[{','.join(map(str, shape))}]"


def _sum(function: str, programs: Sequence[Compilation]) -> str:
    """Returns a line such as "compiled train: 1 program in 3.1 s (...)"."""
    count, cached = len(programs), sum(program.is_cached for program in programs)
    seconds = sum(program.seconds for program in programs)
    return (
        f"compiled {function}: {count:,} program{'s' * (count > 1)} in {seconds:.1f} s "
        f"({_phases(programs)}; {cached:,} from the cache)"
    )


def _phases(programs: Sequence[Compilation]) -> str:
    return ", ".join(
        f"{phase} {sum(getattr(program, phase) for program in programs):.1f} s"
        for phase in ("tracing", "lowering", "compiling")
    )
