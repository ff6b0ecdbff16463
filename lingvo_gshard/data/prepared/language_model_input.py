"""PreparedLanguageModelInput: packed batches of text that gshard-prepare has tokenized."""

from __future__ import annotations

import functools
import os

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.language_model_input import TextSize
from lingvo_gshard.data.prepared import manifest
from lingvo_gshard.data.prepared.base_input import PreparedInput
from lingvo_gshard.data.prepared.mixture_plan import Bucket, Pieces, windows
from lingvo_gshard.data.vocabularies.files import load
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

_PARTS = ("inputs", "labels", "positions", "segments")


class PreparedLanguageModelInput(PreparedInput):
    """Mixes and packs texts. Longer ones are cut into windows; see `Windows.pack` for batches."""

    content = manifest.TEXT

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(packing_window=1024)
        p.define("length", 256, "L: positions of a row.", minimum=2)
        p.define(
            "vocabulary_size",
            0,
            "Ids that planning assumes where the directory is not there.",
            minimum=0,
        )
        return p

    @classmethod
    def buckets_of(cls, params: Params) -> list[Bucket]:
        """Returns the one bucket."""
        return [(params.batch_rows, params.length, params.length)]

    @classmethod
    def specs_of(cls, bucket: Bucket) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch."""
        spec = tf.TensorSpec((bucket[0], bucket[2]), tf.int32)
        return {f"target_{part}": spec for part in _PARTS}

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the size that the manifest or else the Params have."""
        found = manifest.described_vocabularies(params.directory)
        return {"text": found[0].size if found else params.vocabulary_size}

    def vocabulary_sizes(self) -> dict[str, int]:
        """Returns the size of the vocabulary."""
        return {"text": self.vocabulary.size}

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary."""
        return self._prepared_vocabularies["target"]

    @property
    def text_ids(self) -> TextIds:
        """The ids around a text."""
        vocabulary = self.vocabulary
        return TextIds((vocabulary.bos_id,), vocabulary.end_ids, vocabulary.pad_id)

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        """Writes the vocabulary into a directory, such as a checkpoint's."""
        self.vocabulary.save(os.fspath(directory))

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the vocabulary by a saved one."""
        self.vocabulary = load(os.fspath(directory))

    @property
    def sides(self) -> dict[str, tuple[str, Vocabulary]]:
        """The side of a batch -> the ids that layers get, and their vocabulary."""
        return {"target": ("target_inputs", self.vocabulary)}

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> Pieces:
        """Returns windows of rows."""
        return windows(rows, lengths, self.p.length)

    def text_size(self, split: str) -> TextSize:
        """Returns the amount of text in a split."""
        texts = [row.target for row in self.rows(split)]
        return TextSize(
            documents=len(texts),
            bytes=sum(len(one.encode("utf-8")) for one in texts),
            words=sum(len(one.split()) for one in texts),
        )

    def count_tokens(self, split: str) -> int:
        """Returns the number of tokens of a split, including an EOS per document."""
        return sum(group.tokens[1] for group in self.table(split).groups)

    @property
    def _before(self) -> int:
        return self.vocabulary.before[0] if self.vocabulary.before else self.vocabulary.bos_id
