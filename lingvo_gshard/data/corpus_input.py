"""CorpusInput: the base class of inputs that read, clean, tokenize and pack a corpus."""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import gc
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching import batches, packing
from lingvo_gshard.data.batching.packing import Batch, Tokens
from lingvo_gshard.data.input import Input, Observer, SilentObserver, TrainBatches
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.token_kinds import Languages, TokenKinds, kinds_of
from lingvo_gshard.data.vocabularies import vocabulary_trainer
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]

_ENCODED_AT_A_TIME = 10_000


class Examples:
    """The tokenized examples of a split.

    Attributes:
      packer: packs examples into batches.
      kept: numbers of the examples that fit a row.
      report: rows that cleaning kept and dropped.
      members: language -> numbers of its examples.
    """

    def __init__(
        self,
        packer: packing.Packer,
        kept: np.ndarray,
        languages: Sequence[str],
        report: CleaningReport,
    ):
        """Groups examples by language.

        Args:
          packer: packs examples into batches.
          kept: numbers of the examples that fit a row.
          languages: the language of each example in `kept`.
          report: rows that cleaning kept and dropped.
        """
        self.packer, self.kept, self.report = packer, kept, report
        members = collections.defaultdict(list)
        for index, language in zip(kept, languages, strict=True):
            members[language].append(index)
        self.members = {language: np.asarray(m) for language, m in members.items()}

    @functools.cached_property
    def languages(self) -> Languages:
        """The language of each example."""
        return Languages.of(self.members)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pauses the search for cyclic garbage, which would walk over millions of new rows in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CorpusInput(Input):
    """Reads, cleans, tokenizes, mixes and packs a corpus. Each stage runs on first use."""

    # Temperature of the sampling of languages; see batching/batches.py.
    temperature = 1.0

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("corpus", None, "Params of the reader of the corpus.")
        p.define("cleaning", None, "Params of the cleaner.")
        p.define(
            "vocabulary",
            vocabulary_trainer.VocabularyTrainer.params(),
            "Params of the vocabularies.",
        )
        p.define("batch_rows", 16, "B: rows of a batch.", minimum=1)
        p.define("packing_window", 8192, "Examples drawn and packed at a time.", minimum=1)
        p.define(
            "prefetch_batches",
            4,
            "Batches made in advance by a background thread.",
            minimum=0,
            changes_results=False,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._reader = self.p.corpus.instantiate()
        self._cleaner = self.p.cleaning.instantiate()
        self._trainer = self.p.vocabulary.instantiate()
        self._trainer.unicode_form = self.p.cleaning.unicode_form
        self._held_out: dict[str, Examples] = {}
        self._cleaned: dict[str, tuple[list[Row], CleaningReport]] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the corpus has."""
        return self._reader.splits

    def rows(self, split: str) -> list[Row]:
        """Returns the cleaned rows of "train", "dev" or "test" in the order of the corpus.

        Raises:
          UserError: the corpus lacks the split or a language, or rows cannot be read.
        """
        return self._load(split)[0]

    @property
    def report(self) -> CleaningReport:
        """Rows that cleaning and packing of the training split kept and dropped."""
        return self._examples.report

    @property
    def notes(self) -> list[str]:
        """Lines about the training rows and the vocabularies that a user should know."""
        return [*self.report.notes(), *self._reader.notes, *self._trainer.notes]

    def check_split(self, split: str) -> None:
        """Reads and cleans a split.

        Raises:
          UserError: rows cannot be read, or none is left.
        """
        _, report = self._load(split)
        self._check_held_out(split)
        _check_any_left(report, split)

    def train_batches(self, seed: int) -> TrainBatches:
        """Returns the endless iterator of training batches for a seed."""
        examples = self._examples
        mixture = batches.Mixture(examples.members, self.temperature, self.p.packing_window, seed)
        stream = batches.PackedBatches(examples.packer, mixture, self._identity(seed))
        return batches.Prefetcher(stream, self.p.prefetch_batches)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """Yields each row of a split once, packed as in training; the last batch is padded."""
        examples = self._held_out_examples(split)
        yield from packing.in_order(examples.packer, examples.kept)

    def token_kinds(self, batch: Batch) -> TokenKinds:
        """Returns the languages of the tokens of a training batch and their classes."""
        return kinds_of(batch, self._sides(), self._examples.languages)

    @abc.abstractmethod
    def _sides(self) -> dict[str, tuple[str, Vocabulary]]:
        """Returns the sides of a batch -> the ids that layers get, and their vocabulary."""

    @abc.abstractmethod
    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> Examples:
        """Returns the examples of a split.

        Args:
          split: "train", "dev" or "test".
          rows: its cleaned rows.
          report: what cleaning kept and dropped.
        """

    @abc.abstractmethod
    def _settings(self) -> tuple[object, ...]:
        """Returns the settings that determine the training batches, besides examples and seed."""

    def _choose(self, rows: list[Row], split: str) -> list[Row]:
        """Returns the rows to use among those read."""
        del split
        return rows

    def _forget_tokens(self) -> None:
        """Drops tokenized text, after a change of vocabularies."""
        vars(self).pop("_examples", None)
        self._held_out.clear()

    def _check_held_out(self, split: str) -> None:
        """Raises ValueError if rows of train should have been held out for a split and none is."""
        if split not in self.splits and self._reader.notes:
            raise UserError(" ".join(self._reader.notes))

    @_without_collection()
    def _load(self, split: str) -> tuple[list[Row], CleaningReport]:
        if split not in self._cleaned:
            self._check_held_out(split)
            if split == "train":
                # A missing dev file must not cost the reading of train.
                self._reader.check_files()
            self._reader.observer = self._trainer.observer = self.observer
            self.observer.begin(f"Reading {split}", "rows")
            rows = self._choose(self._reader.rows(split), split)
            self.observer.begin(f"Cleaning {split}", "rows")
            kept, report = self._cleaner.clean(rows, split, self.observer)
            report.examples |= self._reader.examples
            for reason, count in self._reader.left_out.items():
                report.read += count
                report.dropped[reason] += count
            if split == "train":
                _check_any_left(report, split)
            self._cleaned[split] = kept, report
        return self._cleaned[split]

    @functools.cached_property
    def _examples(self) -> Examples:
        rows, report = self._load("train")
        with _without_collection():
            examples = self._tokenize("train", rows, report)
        _check_any_left(examples.report, "train")
        return examples

    def _held_out_examples(self, split: str) -> Examples:
        if split not in self._held_out:
            self._held_out[split] = self._tokenize(split, *self._load(split))
        return self._held_out[split]

    def _identity(self, seed: int) -> str:
        digest = hashlib.sha256()
        for part in self._examples.packer.tables():
            digest.update(part.tobytes())
        for language, members in sorted(self._examples.members.items()):
            digest.update(language.encode() + members.tobytes())
        digest.update(repr((*self._settings(), seed)).encode())
        return digest.hexdigest()[:16]


def encode(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    observer: Observer | None = None,
    first: Sequence[int] = (),
    encode_batch: EncodeBatch | None = None,
) -> Tokens:
    """Returns the ids of texts, each followed by EOS. Repeated texts are encoded once.

    Args:
      texts: lines or documents.
      vocabulary: encodes them.
      observer: is told how far encoding is.
      first: ids that each text begins with.
      encode_batch: encodes in place of `vocabulary.encode_batch`.
    """
    encode_batch = encode_batch or vocabulary.encode_batch
    observer = observer or SilentObserver()
    numbers = dict(zip(dict.fromkeys(texts), itertools.count(), strict=False))
    unique = list(numbers)
    parts = []
    # In parts, since lists of Python integers of millions of lines would take gigabytes.
    for begin in range(0, len(unique), _ENCODED_AT_A_TIME):
        observer.update(begin, begin / len(unique))
        encoded = encode_batch(unique[begin : begin + _ENCODED_AT_A_TIME])
        if first:
            encoded = [[*first, *ids] for ids in encoded]
        parts.append(Tokens.concatenate(encoded).with_end(vocabulary.eos_id))
    table = Tokens.join(parts)
    chosen = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
    return Tokens.of(table.gather(chosen), table.lengths[chosen])


def _check_any_left(report: CleaningReport, split: str) -> None:
    """Raises ValueError if no row of a split is left."""
    if report.kept:
        return
    if not report.read:
        raise UserError(f"input.corpus.{split} has no rows: its files are empty")
    advice = " ".join(report.advice())
    kind = "training" if split == "train" else split
    raise UserError(
        f"No {kind} row is left of {report.read:,}: {report.reasons()}. {advice}".rstrip()
    )
