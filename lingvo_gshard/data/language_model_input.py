"""LanguageModelInput: turns documents into packed batches."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.data.batching.windows import Windows
from lingvo_gshard.data.cleaning.leaks import DocumentCleaner
from lingvo_gshard.data.corpus_input import CorpusInput, Examples, encode
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.sources import text
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies import vocabulary_trainer
from lingvo_gshard.data.vocabularies.files import load
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

_PARTS = ("inputs", "labels", "segments", "positions")
# SentencePiece ignores training lines longer than some thousand bytes.
_LONGEST_LINE = 1000


@dataclasses.dataclass(frozen=True)
class TextSize:
    """Amount of text in a split after cleaning.

    Attributes:
      documents: number of documents.
      bytes: bytes of their UTF-8 text.
      words: number of words, separated by white space.
    """

    documents: int
    bytes: int
    words: int


class LanguageModelInput(CorpusInput):
    """Reads, cleans, tokenizes and packs documents. Each stage runs on first use.

    Documents longer than a row are cut into consecutive windows; shorter ones share rows. Each
    document ends with EOS. Batches are dicts of int32 arrays, described in `Windows.pack`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(
            corpus=text.EmbeddedEnglish.params(),
            cleaning=DocumentCleaner.params(),
        )
        p.define("length", 256, "L: positions of a row.", minimum=2)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        vocabulary = self.p.vocabulary
        if not vocabulary.joint:
            raise UserError("input.vocabulary.joint is False: a language model has one side only")
        if not vocabulary.byte_fallback and not vocabulary.files:
            raise UserError(
                "input.vocabulary.byte_fallback is False, but bits per byte need a vocabulary that "
                "spells every text: True was expected"
            )

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, trained on the lines of the training documents."""
        lines = {line for row in self.rows("train") for line in row.target.split("\n")}
        parts = {
            line[begin : begin + _LONGEST_LINE]
            for line in lines
            for begin in range(0, len(line), _LONGEST_LINE)
        }
        return self._trainer.train_on({"": sorted(parts)}, self.temperature)

    @property
    def text_ids(self) -> TextIds:
        """The ids around a text."""
        if not self.p.vocabulary.files:
            return super().text_ids
        vocabulary = self.vocabulary
        return TextIds((vocabulary.bos_id,), vocabulary.end_ids, vocabulary.pad_id)

    def save_vocabularies(self, directory: str) -> None:
        """Writes the vocabulary into a directory, such as a checkpoint's."""
        self.vocabulary.save(directory)

    def load_vocabularies(self, directory: str) -> None:
        """Replaces the vocabulary by a saved one."""
        self.vocabulary = load(directory)
        self._forget_tokens()

    @classmethod
    def batch_specs(cls, params: Params) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch, without reading text."""
        spec = tf.TensorSpec((params.batch_rows, params.length), tf.int32)
        return {f"target_{part}": spec for part in sorted(_PARTS)}

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the vocabulary size that the Params ask for."""
        return {"text": vocabulary_trainer.configured_sizes(params.vocabulary)[0]}

    def vocabulary_sizes(self) -> dict[str, int]:
        """Returns the size of the vocabulary."""
        return {"text": self.vocabulary.size}

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
        windows = self._held_out_examples(split).packer
        assert isinstance(windows, Windows)
        return int(windows.labels.lengths.sum())

    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> Examples:
        del split
        texts, vocabulary = [row.target for row in rows], self.vocabulary
        self.observer.begin("Tokenizing", "documents")
        documents = encode(texts, vocabulary, self.observer)
        windows = Windows.cut(documents, (self.p.batch_rows, self.p.length), vocabulary.bos_id)
        every = np.arange(len(windows.labels))
        languages = [rows[document].language for document in windows.documents]
        return Examples(windows, every, languages, report)

    def _sides(self) -> dict[str, tuple[str, Vocabulary]]:
        return {"target": ("target_inputs", self.vocabulary)}

    def _settings(self) -> tuple[object, ...]:
        return self.p.batch_rows, self.p.length, self.p.packing_window
