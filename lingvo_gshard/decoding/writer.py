"""Writer: continues beginnings of texts with a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.decoding.models import LanguageModel
from lingvo_gshard.decoding.sampling import Sampling, continue_texts


@dataclasses.dataclass(frozen=True)
class Text:
    """The texts that continue one beginning.

    Attributes:
      samples: complete texts, each starting with the beginning.
      cut: number of tokens at the start of the beginning that the model did not see, because the
        row had no room.
    """

    samples: list[str]
    cut: int


class Writer:
    """Continues beginnings of texts with one language model.

    A row of the model has `length` tokens, of which `most_tokens` are reserved for new ones. Of a
    beginning that is too long for the rest, the model sees only the end.
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
        """Prepares to write; nothing is compiled yet.

        Args:
          task: the model.
          runtime: holds the model's weights.
          vocabulary: encodes beginnings and decodes texts.
          length: tokens of a row in training.
          most_tokens: largest number of new tokens; 0: until the row is full, at least half a row.
          samples: texts for each beginning.
          sampling: how to draw tokens.
          seed: another seed draws other texts.
          rows: beginnings continued in one batch.

        Raises:
          ValueError: `most_tokens` is more than `length`, or `samples` is less than 1.
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
        """Yields a Text for each beginning, in order; an empty one lets the model begin."""
        for first in range(0, len(beginnings), self._rows):
            yield from self._write_batch(beginnings[first : first + self._rows])

    def _write_batch(self, beginnings: Sequence[str]) -> list[Text]:
        tokens = [self._vocabulary.encode(text) for text in beginnings]
        room = self._length - (self._most_tokens or (self._length + 1) // 2)
        cuts = [max(len(ids) - room, 0) for ids in tokens]
        # Columns: the token before the text, the given tokens, and the number of the sample.
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
        """Returns the text of a row, with the part of the beginning that the model did not see."""
        given = len(ids) - cut
        most = self._most_tokens or self._length
        return self._vocabulary.decode(ids + row[given : given + most].tolist())

    def _write_on(self, theta: NestedMap, packed: tf.Tensor) -> tf.Tensor:
        with context.scope(training=False):
            return continue_texts(
                self._task,
                theta,
                packed[:, 1:-1],
                packed[:, 0],
                packed[:, -1],
                self._vocabulary.eos_id,
                self._sampling,
                tf.constant(self._key),
            )
