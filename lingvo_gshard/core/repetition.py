"""Repetition: names and random numbers of layers that run as one compiled loop."""

from __future__ import annotations

import dataclasses
import re

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf


@dataclasses.dataclass(frozen=True)
class Repetition:
    """A loop over layers. Each iteration runs the same body of layers with different weights.

    With a body of two layers, `encoder.layers.body[1]` represents the layers
    `encoder.layers[1]`, `encoder.layers[3]` and so on. Initial weights, random numbers and metrics
    use these names, so that they are the same as without the loop.

    Attributes:
      path: Path of the loop, such as "encoder.layers".
    """

    path: str
    body: int
    times: int

    def paths(self, path: str) -> list[str]:
        """Returns the paths of a layer of the body in all iterations, or another path unchanged."""
        prefix = f"{self.path}.body["
        if not path.startswith(prefix):
            return [path] * self.times
        position, _, rest = path.removeprefix(prefix).partition("]")
        first = int(position)
        return [f"{self.path}[{first + r * self.body}]{rest}" for r in range(self.times)]

    def stacked(self, path: str) -> str:
        """Returns one name for the stacked values of all iterations: "encoder.layers[1::2]".

        Args:
          path: Path of a layer of the body. Other paths get the suffix "[0::1]".
        """
        prefix = f"{self.path}.body["
        if not path.startswith(prefix):
            return f"{path}[0::1]"
        position, _, rest = path.removeprefix(prefix).partition("]")
        return f"{self.path}[{position}::{self.body}]{rest}"


_STACKED = re.compile(r"\[(\d+)::(\d+)\]")


def unstacked(name: str, times: int) -> list[str]:
    """Returns the name for each iteration. This is the inverse of `Repetition.stacked`.

    Raises:
      ValueError: `Repetition.stacked` did not return the name.
    """
    match = _STACKED.search(name)
    if match is None:
        raise ValueError(f"{name!r} names no stacked values")
    first, step = map(int, match.groups())
    return [_STACKED.sub(f"[{first + r * step}]", name, count=1) for r in range(times)]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of a loop over layers.

    Attributes:
      index: Number of the iteration; an int32 scalar tensor in a compiled loop.
    """

    repetition: Repetition
    index: tf.Tensor | int

    def path(self, path: str) -> str:
        """Returns the path that a layer of the body has in this iteration.

        In a compiled loop the index is not known at trace time. The path is returned unchanged.
        """
        if isinstance(self.index, int):
            return self.repetition.paths(path)[self.index]
        return path

    def word(self, path: str) -> tf.Tensor:
        """Returns `random_numbers.word` of the path in this iteration, an int32 scalar."""
        words = [random_numbers.word(name) for name in self.repetition.paths(path)]
        return tf.gather(tf.constant(words, tf.int32), self.index)
