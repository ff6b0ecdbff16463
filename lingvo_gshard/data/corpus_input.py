"""CorpusInput: the base class of inputs that read, clean and tokenize a corpus into memory."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import gc
import hashlib
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import stages
from lingvo_gshard.data.batching.mixture_plan import Mixture, Pieces, Planner, language_shares
from lingvo_gshard.data.batching.table import Group, MemoryTable
from lingvo_gshard.data.packed_input import PackedInput
from lingvo_gshard.data.sources.report import LIMITS, REPORT_NOTES, CleaningReport
from lingvo_gshard.data.sources.row import Row


@dataclasses.dataclass(frozen=True)
class TokenizedRows:
    """The tokenized rows of a split.

    Attributes:
      table: the rows that fit a batch's row.
      report: rows that cleaning and tokenizing kept and dropped.
    """

    table: MemoryTable
    report: CleaningReport


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


class CorpusInput(PackedInput):
    """Reads, cleans, tokenizes, mixes and packs a corpus. Each stage runs on first use."""

    # Temperature of the sampling of languages; see `mixture_plan.language_shares`.
    temperature = 1.0

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("corpus", None, "Params of the reader of the corpus.")
        p.define("cleaning", None, "Params of the cleaner.")
        vocabularies = stages.INPUT_STAGES[stages.VOCABULARIES].params()
        p.define("vocabulary", vocabularies, "Params of the vocabularies.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._reader = self.p.corpus.instantiate()
        self._cleaner: stages.RowCleaner = self.p.cleaning.instantiate()
        self._trainer: stages.VocabularyMaker = self.p.vocabulary.instantiate()
        self._trainer.unicode_form = self._cleaner.unicode_form
        self._cleaned: dict[str, tuple[list[Row], CleaningReport]] = {}
        self._tokenized: dict[str, TokenizedRows] = {}

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
        return self._tokenized_rows("train").report

    @property
    def notes(self) -> list[str]:
        """Lines about the training rows and the vocabularies that a user should know."""
        about_rows = [line for notes in REPORT_NOTES for line in notes(self.report)]
        about_files = self._reader.notes + self._reader.file_notes
        return [*about_rows, *about_files, *self._trainer.notes]

    def check_split(self, split: str) -> None:
        """Reads and cleans a split.

        Raises:
          UserError: rows cannot be read, or none is left.
        """
        _, report = self._load(split)
        self._check_held_out(split)
        _check_any_left(report, split)

    def table(self, split: str) -> MemoryTable:
        """Returns the rows of a split that fit a batch's row.

        Raises:
          UserError: the corpus lacks the split or a language, or rows cannot be read.
        """
        return self._tokenized_rows(split).table

    @abc.abstractmethod
    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> TokenizedRows:
        """Returns the tokenized rows of a split, from its cleaned rows and their report."""

    def _plan(self, seed: int) -> Planner:
        # Pieces are drawn, not rows: one text may be as long as a book.
        table = self.table("train")
        rows = np.arange(len(table))
        pieces = self.cut(rows, table.lengths_of(rows))
        groups, window = _groups_of(pieces, table), self.p.packing_window
        shares = language_shares(groups, self.temperature)
        mixture = Mixture(groups, [shares], window, seed)
        return Planner(mixture, pieces.__getitem__, self.buckets, seed, *self.packing)

    def _identity(self, seed: int) -> str:
        settings = self.buckets, float(self.temperature), *self.packing, self.before
        content = repr((self.table("train").digest(), *settings, seed))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _choose(self, rows: list[Row], split: str) -> list[Row]:
        """Returns the rows to use among those read."""
        del split
        return rows

    def _forget_tokens(self) -> None:
        """Drops tokenized text, after a change of vocabularies."""
        self._tokenized.clear()

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
            self._reader.progress = self._trainer.progress = self.progress
            self.progress.begin(f"Reading {split}", "rows")
            rows = self._choose(self._reader.rows(split), split)
            self.progress.begin(f"Cleaning {split}", "rows")
            kept, report = self._cleaner.clean(rows, split, self.progress)
            report.examples |= self._reader.examples
            for reason, count in self._reader.left_out.items():
                report.read += count
                report.dropped[reason] += count
            if split == "train":
                _check_any_left(report, split)
            self._cleaned[split] = kept, report
        return self._cleaned[split]

    def _tokenized_rows(self, split: str) -> TokenizedRows:
        if split not in self._tokenized:
            rows, report = self._load(split)
            with _without_collection():
                tokenized = self._tokenize(split, rows, report)
            if split == "train":
                _check_any_left(tokenized.report, split)
            self._tokenized[split] = tokenized
        return self._tokenized[split]


def _groups_of(pieces: Pieces, table: MemoryTable) -> list[Group]:
    """Returns the groups of a table with numbers of pieces in place of numbers of rows."""
    ends = [group.begin + group.rows for group in table.groups]
    begins = [0, *np.searchsorted(pieces.rows, ends).tolist()]
    return [
        dataclasses.replace(group, begin=begin, rows=end - begin)
        for group, begin, end in zip(table.groups, begins, begins[1:], strict=False)
    ]


def _check_any_left(report: CleaningReport, split: str) -> None:
    """Raises ValueError if no row of a split is left."""
    if report.kept:
        return
    if not report.read:
        raise UserError(f"input.corpus.{split} has no rows: its files are empty")
    advice = " ".join(REPORT_NOTES[LIMITS](report)) if LIMITS in REPORT_NOTES else ""
    kind = "training" if split == "train" else split
    raise UserError(
        f"No {kind} row is left of {report.read:,}: {report.reasons()}. {advice}".rstrip()
    )
