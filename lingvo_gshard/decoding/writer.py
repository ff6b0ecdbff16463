"""Writer: beginnings of texts in, texts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.decoding.models import LanguageModel
from lingvo_gshard.decoding.sampling import Sampling, write_on


@dataclasses.dataclass(frozen=True)
class Text:
    """What was written after a beginning.

    samples: whole texts, the beginning with them. cut: of how many tokens of the beginning the
    model saw nothing, since there was no room.
    """

    samples: list[str]
    cut: int


class Writer:
    """Goes on with beginnings of texts, by one language model.

    A row of the model's has `length` tokens, in which the beginning leaves `most_tokens` to be
    written, or what is left of it; of a longer beginning the model sees the end.
    """

    def __init__(
        self,
        task: LanguageModel,
        runtime: WeightsHolder,
        vocabulary: Vocabulary,
        length: int,
        most_tokens: int = 0,
        samples: int = 1,
        sampling: Sampling | None = None,
        seed: int = 0,
        rows: int = 16,
    ):
        """Writes on a runtime that holds the task's weights.

        length: as many tokens as rows had in training. most_tokens: to be written of each; 0: until
        the row is full, at least half of it. samples: texts to each beginning. rows: beginnings
        written on together; more wait. Raises ValueError if most_tokens are more than length.
        """
        if not 0 <= most_tokens <= length:
            raise ValueError(f"most_tokens is {most_tokens}; 0 to {length}, a row, was expected")
        if samples < 1:
            raise ValueError(f"samples is {samples}; 1 or more was expected")
        self._task, self._vocabulary = task, vocabulary
        self._length, self._most_tokens = length, most_tokens
        self._samples, self._rows = samples, rows
        self._sampling = sampling or Sampling()
        self._key = np.array([seed, 0], np.int32)
        self._write = runtime.bind_weights(self._write_on)

    def write(self, beginnings: Sequence[str]) -> Iterator[Text]:
        """Yields a Text for each beginning, in order; an empty one begins a text of its own."""
        for first in range(0, len(beginnings), self._rows):
            yield from self._write_batch(beginnings[first : first + self._rows])

    def _write_batch(self, beginnings: Sequence[str]) -> list[Text]:
        tokens = [self._vocabulary.encode(text) for text in beginnings]
        room = self._length - (self._most_tokens or (self._length + 1) // 2)
        cuts = [max(len(ids) - room, 0) for ids in tokens]
        # Columns: the token before, those given, and the number of the sample.
        packed = np.zeros([self._rows * self._samples, self._length + 2], np.int32)
        for row in range(len(tokens) * self._samples):
            ids, cut = tokens[row // self._samples], cuts[row // self._samples]
            shown = ([self._vocabulary.bos_id] + ids)[cut:]
            packed[row, : len(shown)] = shown
            packed[row, -1] = row % self._samples
        written = self._write(packed).reshape(self._rows, self._samples, -1)
        return [
            Text([self._text(ids, cut, row) for row in rows], cut)
            for ids, cut, rows in zip(tokens, cuts, written, strict=False)
        ]

    def _text(self, ids: list[int], cut: int, row: np.ndarray) -> str:
        """A whole text: what the model did not see of its beginning, and its row."""
        given = len(ids) - cut
        most = self._most_tokens or self._length
        return self._vocabulary.decode(ids + row[given : given + most].tolist())

    def _write_on(self, theta: NestedMap, packed: tf.Tensor) -> tf.Tensor:
        with context.scope(training=False):
            return write_on(
                self._task,
                theta,
                packed[:, 1:-1],
                packed[:, 0],
                packed[:, -1],
                self._vocabulary.eos_id,
                self._sampling,
                tf.constant(self._key),
            )
