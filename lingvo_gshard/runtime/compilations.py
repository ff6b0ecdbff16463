"""The programs that a runtime compiles: what each cost, and whether one is being compiled."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from lingvo_gshard.core import known_sizes, tf


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
        """Seconds of all phases together."""
        return self.tracing + self.lowering + self.compiling

    def words(self) -> str:
        """Returns a line such as "compiled in 3.1 s (tracing 1.0 s, ...)"."""
        where = ", from the cache" if self.is_cached else ""
        return f"compiled in {self.seconds:.1f} s ({phases([self])}{where})"

    def record(self) -> dict:
        """Returns the compilation as JSON values."""
        values = dataclasses.asdict(self)
        return values | {"inputs": {name: input_words(pair) for name, pair in self.inputs.items()}}


def inputs_of(batch: Mapping[str, np.ndarray | tf.Tensor]) -> Inputs:
    """Returns shape and dtype of each array of a batch, by name in alphabetical order."""
    return {
        name: (tuple(known_sizes(tf.TensorShape(array.shape))), tf.as_dtype(array.dtype).name)
        for name, array in sorted(batch.items())
    }


def input_words(pair: tuple[tuple[int, ...], str]) -> str:
    """Returns an input such as `int32[8,16]`."""
    shape, dtype = pair
    return f"{dtype}[{','.join(map(str, shape))}]"


def phases(programs: Sequence[Compilation]) -> str:
    """Returns the seconds of each phase, summed over programs, in words."""
    return ", ".join(
        f"{phase} {sum(getattr(program, phase) for program in programs):.1f} s"
        for phase in ("tracing", "lowering", "compiling")
    )
