"""Repetition: layers that are one loop, and which of them a pass is in."""

from __future__ import annotations

import dataclasses
import re

import tensorflow as tf

from lingvo_gshard.core import random_numbers


@dataclasses.dataclass(frozen=True)
class Repetition:
    """A body of layers that is run several times, each time with weights of its own.

    path: of the loop, `encoder.layers`. Layer `encoder.layers.body[1]` of a body of two stands for
    `encoder.layers[1]`, `encoder.layers[3]`, ...: by these names its weights begin, its random
    numbers are drawn and its metrics are reported, as if there were no loop.
    """

    path: str
    body: int
    times: int

    def paths(self, path: str) -> list[str]:
        """Returns what a path within the body stands for, iteration by iteration."""
        prefix = f"{self.path}.body["
        if not path.startswith(prefix):
            return [path] * self.times
        position, _, rest = path.removeprefix(prefix).partition("]")
        first = int(position)
        return [f"{self.path}[{first + r * self.body}]{rest}" for r in range(self.times)]

    def stacked(self, path: str) -> str:
        """Returns the one name, `encoder.layers[1::2]`, of all that a path in the body stands for.

        A path that is not the body's stands for itself, time after time.
        """
        prefix = f"{self.path}.body["
        if not path.startswith(prefix):
            return f"{path}[0::1]"
        position, _, rest = path.removeprefix(prefix).partition("]")
        return f"{self.path}[{position}::{self.body}]{rest}"


_STACKED = re.compile(r"\[(\d+)::(\d+)\]")


def unstacked(name: str, times: int) -> list[str]:
    """Returns the names, one by one, that a name stands for which `Repetition.stacked` gave."""
    first, step = map(int, _STACKED.search(name).groups())
    return [_STACKED.sub(f"[{first + r * step}]", name, count=1) for r in range(times)]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One time through the body of a repetition; in a compiled loop `index` is a tensor."""

    repetition: Repetition
    index: tf.Tensor | int

    def path(self, path: str) -> str:
        """Returns what a path within the body stands for; the body's own in a compiled loop."""
        if isinstance(self.index, int):
            return self.repetition.paths(path)[self.index]
        return path

    def word(self, path: str) -> tf.Tensor:
        """Returns the word that the path's name in this iteration is mixed into keys as."""
        words = [random_numbers.word(name) for name in self.repetition.paths(path)]
        return tf.gather(tf.constant(words, tf.int32), self.index)
