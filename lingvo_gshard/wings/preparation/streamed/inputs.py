"""Inputs that read data sets of Hugging Face while training goes on."""

from __future__ import annotations

import abc
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import (
    CleaningReport,
    MemoryTable,
    PackedInput,
    PairInput,
    Row,
    TextInput,
    TrainBatches,
    Vocabulary,
    mixture_plan,
    permutation,
    readers,
)
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.leaks import DocumentCleaner
from lingvo_gshard.wings.preparation.streamed.examples import DatasetReader
from lingvo_gshard.wings.preparation.vocabularies import vocabulary_trainer

# Rows and batches are shuffled with different keys, so that their orders are independent.
_ROWS, _BATCHES = 5, 6
_PACKAGE = __name__.removesuffix("streamed.inputs")


class StreamedInput(PackedInput):
    """Reads a data set in its order, block by block, and shuffles and packs the rows of a block.

    Rows are cleaned one by one, and duplicates are kept. The vocabulary is trained on the first
    rows, unless `vocabulary.files` names one. Each process reads the whole stream.
    """

    _is_text = False

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("dataset", DatasetReader.params(), "Params of the data set.")
        p.define("cleaning", Cleaner.params(), "Params of the cleaner.")
        p.define(
            "vocabulary", vocabulary_trainer.VocabularyTrainer.params(), "Params of vocabularies."
        )
        p.define("vocabulary_rows", 100_000, "Rows that the vocabulary is trained on.", minimum=1)
        p.define(
            "block_rows",
            32_768,
            "Rows that are shuffled and packed together. A run that goes on reads half of them "
            "again, on average.",
            minimum=1,
        )
        p.define("evaluation_rows", 2000, "Largest number of rows of dev and of test.", minimum=1)
        about = "What to do with an example without texts: 'refuse' or 'skip'."
        p.define("on_bad_row", "refuse", about, choices=readers.ON_BAD_ROW)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._reader: DatasetReader = self.p.dataset.instantiate()
        self._cleaner = self.p.cleaning.instantiate()
        self._trainer = self.p.vocabulary.instantiate()
        self._trainer.unicode_form = self._cleaner.unicode_form
        self._fields = self._reader.fields(self._is_text)

    @abc.abstractmethod
    def tokenized(self, rows: Sequence[Row]) -> MemoryTable:
        """Returns the tokens of rows, which keep their order if they are of one language."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have a name."""
        return self._reader.splits

    def check_split(self, split: str) -> None:
        """Reads an example of a split; UserError if it cannot be read, or has none."""
        if not self._first_rows(split, 1):
            raise UserError(f"input.dataset.{split}: no row is left after cleaning")

    def rows(self, split: str) -> list[Row]:
        """Returns the first rows of a split as text, `evaluation_rows` at most."""
        return self._first_rows(split, self.p.evaluation_rows)

    def table(self, split: str) -> MemoryTable:
        """Returns the first rows of a split, `evaluation_rows` at most."""
        if split not in self._tables:
            self._tables[split] = self.tokenized(self.rows(split))
        return self._tables[split]

    @functools.cached_property
    def _tables(self) -> dict[str, MemoryTable]:
        return {}

    def _first_rows(self, split: str, count: int) -> list[Row]:
        clean = self._cleaner.rules(split, CleaningReport(split))
        examples = enumerate(self._reader.examples(split), start=1)
        found = (
            kept
            for number, example in examples
            for row in self._rows_of(example, number)
            if (kept := clean(row)) is not None
        )
        return list(itertools.islice(found, count))

    def _rows_of(self, example: Mapping[str, Any], number: int) -> list[Row]:
        """Returns the rows of an example; UserError for a bad one that is to be refused."""
        rows = self._fields.rows(example, self.p.dataset.path, number)
        if not isinstance(rows, str):
            return rows
        if self.p.on_bad_row == "refuse":
            raise UserError(
                f"{self.p.dataset.path}: example {number}: {rows}. Set input.on_bad_row = 'skip' "
                "to leave such examples out"
            )
        return []

    def train_batches(self, seed: int) -> TrainBatches:
        from lingvo_gshard.wings.preparation.streamed.blocks import Recipe, StreamedBatches

        clean = self._cleaner.rules("train", CleaningReport("train"))

        def rows(example: Mapping[str, Any], number: int) -> list[Row]:
            found = (clean(row) for row in self._rows_of(example, number))
            return [row for row in found if row is not None]

        recipe = Recipe(
            functools.partial(self._reader.examples, "train"),
            rows,
            self.p.block_rows,
            functools.partial(self._pack, seed),
        )
        self._batches = StreamedBatches(recipe, self.p.prefetch_batches, self._identity(seed))
        return self._batches

    def _pack(
        self, seed: int, rows: list[Row], block: int
    ) -> tuple[list[mixture_plan.PlannedBatch], Any]:
        """Returns the planned batches of the rows of a block, and what makes them."""
        order = permutation(len(rows), seed, _ROWS, block)
        table = self.tokenized([rows[place] for place in order.tolist()])
        # A table is ordered by language.
        numbers = permutation(len(table), seed, _ROWS, block)
        pieces = self.cut(numbers, table.lengths_of(numbers))
        last = len(self.buckets) - 1
        parts = iter([pieces])
        planned = list(mixture_plan.in_order(parts, self.buckets[-1], last, *self.packing))
        batches = permutation(len(planned), seed, _BATCHES, block).tolist()
        assembly = self._assembly(table, f"{self._identity(seed)} {block} {table.digest()}")
        return [planned[place] for place in batches], assembly

    def usage_notes(self) -> list[str]:
        """Returns a line about what was read."""
        from lingvo_gshard.wings.preparation.streamed.blocks import StreamedBatches

        if not isinstance(self._batches, StreamedBatches):
            return []
        position = self._batches.position
        return [
            f"rows read before the last block of {self.p.block_rows:,}: {position.rows:,}; whole "
            f"epochs: {position.epoch}"
        ]

    def row_groups(self) -> None:
        """Returns None: the languages of a stream are not known in advance."""

    def _plan(self, seed: int) -> mixture_plan.Planner:
        raise NotImplementedError("a stream has no plan of all batches")

    def _identity(self, seed: int) -> str:
        settings = self.p.dataset, self.p.cleaning, self.p.vocabulary
        # Positions of earlier versions go on, which knew the classes by these names.
        texts = [each.to_text().replace(_PACKAGE, "lingvo_gshard.data.") for each in settings]
        sizes = self.buckets, *self.packing, self.p.block_rows, self.p.vocabulary_rows
        content = repr((texts, *sizes, self.p.on_bad_row, self.before, seed))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _forget_tokens(self) -> None:
        """Drops tokenized text, after a change of vocabularies."""
        self._tables.clear()


class StreamedTranslationInput(PairInput, StreamedInput):
    """Streams and packs sentence pairs."""

    @functools.cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._trainer.train(self._first_rows("train", self.p.vocabulary_rows), 1.0)


class StreamedLanguageModelInput(TextInput, StreamedInput):
    """Streams and packs texts."""

    _is_text = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(cleaning=DocumentCleaner.params(), packing_window=1024, block_rows=4096)
        return p

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The vocabulary."""
        rows = self._first_rows("train", self.p.vocabulary_rows)
        return self._trainer.train_on_documents(rows, 1.0)
