"""PackedInput: the base class of inputs that mix and pack the rows of a table.

The table is in memory (corpus_input.py) or on disk (prepared/base_input.py).
Both have the same plan of batches, packing and positions in the stream.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lingvo_gshard.core import SILENT, Params, Progress, tf
from lingvo_gshard.data.batching import mixture_plan
from lingvo_gshard.data.batching.packing import Batch, Tokens
from lingvo_gshard.data.batching.table import Group, MemoryTable, Table
from lingvo_gshard.data.input import Input, TextIds, TrainBatches
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

if TYPE_CHECKING:
    from lingvo_gshard.data.batching import stream

_ROWS_AT_A_TIME = 8192


class PackedInput(Input):
    """Mixes and packs tokenized rows."""

    # The language of rows whose language is not known.
    unknown_language = ""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("batch_rows", 16, "B: rows of a batch.", minimum=1)
        p.define(
            "packing_window",
            8192,
            "Rows (of texts in memory: windows) drawn at a time, and pieces of rows to choose from "
            "when a batch's rows are filled.",
            minimum=1,
        )
        p.define(
            "most_segments",
            0,
            "The most sentences or texts of a row; 0: as many as fit. GPUs from Hopper on compute "
            "attention faster with a limit, such as 16.",
            minimum=0,
        )
        p.define("prefetch_batches", 4, "Batches made ahead.", minimum=0, changes_results=False)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._planner: mixture_plan.Planner | None = None
        self._batches: TrainBatches | None = None
        # Checked here, so that a mistake is told before anything is read.
        self.buckets = self.buckets_of(self.p)

    @property
    def packing(self) -> tuple[int, ...]:
        """The packing window, and the most segments of a row if they are limited."""
        most = self.p.most_segments
        return (self.p.packing_window, most) if most else (self.p.packing_window,)

    @classmethod
    @abc.abstractmethod
    def buckets_of(cls, params: Params) -> list[mixture_plan.Bucket]:
        """Returns rows, source length and target length of each bucket, the shortest first."""

    @classmethod
    @abc.abstractmethod
    def specs_of(cls, bucket: mixture_plan.Bucket) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch of a bucket."""

    @property
    @abc.abstractmethod
    def sides(self) -> dict[str, tuple[str, Vocabulary]]:
        """The sides of a batch -> the ids that layers get, and their vocabulary."""

    @abc.abstractmethod
    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> mixture_plan.Pieces:
        """Returns the pieces of rows.

        Args:
          rows: int64 [N], numbers of the rows.
          lengths: int64 [N,2], their source and target tokens.
        """

    @property
    @abc.abstractmethod
    def before(self) -> int:
        """The id before the first token of a target."""

    @abc.abstractmethod
    def rows(self, split: str) -> list[Row]:
        """Returns the rows of a split as text."""

    @abc.abstractmethod
    def table(self, split: str) -> Table:
        """Returns the rows of a split.

        Raises:
          UserError: there is no such split, or its rows cannot be read.
        """

    @abc.abstractmethod
    def _plan(self, seed: int) -> mixture_plan.Planner:
        """Returns the plan of the training batches for a seed."""

    @abc.abstractmethod
    def _identity(self, seed: int) -> str:
        """Returns a digest of the training rows, the settings of batches, and a seed."""

    @classmethod
    def batch_specs(cls, params: Params) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch of the longest bucket."""
        return cls.specs_of(cls.buckets_of(params)[-1])

    @classmethod
    def declared_batches(cls, params: Params) -> list[dict[str, tf.TensorSpec]]:
        return [cls.specs_of(bucket) for bucket in cls.buckets_of(params)]

    def train_batches(self, seed: int) -> TrainBatches:
        # grain takes half a second to import.
        from lingvo_gshard.data.batching import stream

        self._planner, identity = self._plan(seed), self._identity(seed)
        assembly = self._assembly(self.table("train"), identity)
        batches = stream.dataset(self._planner, assembly, self._own_rows, self.p.prefetch_batches)
        self._batches = stream.PlannedBatches(batches, identity)
        return self._batches

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """Yields each row of a split once, in rows of the longest bucket."""
        return self.pack_table(self.table(split))

    def pack_table(self, table: Table, numbers: range | None = None) -> Iterator[Batch]:
        """Packs each row of a table once, into batches of the longest bucket.

        Rows that are too long are left out; the last batch may have empty rows.

        Args:
          numbers: numbers of the rows; None for all.
        """
        assembly = self._assembly(table)
        numbers = range(len(table)) if numbers is None else numbers
        parts = (
            np.arange(begin, min(begin + _ROWS_AT_A_TIME, numbers.stop))
            for begin in range(numbers.start, numbers.stop, _ROWS_AT_A_TIME)
        )
        pieces = (self.cut(rows, table.lengths_of(rows)) for rows in parts)
        last = len(self.buckets) - 1
        for planned in mixture_plan.in_order(pieces, self.buckets[-1], last, *self.packing):
            yield assembly.batch(planned, assembly.read([planned]))

    def _assembly(self, table: Table, identity: str = "") -> stream.Assembly:
        """Returns what makes the batches of a table; see `stream.Assembly`."""
        from lingvo_gshard.data.batching import stream

        return stream.Assembly(
            table, self.buckets, self.before, "source" in self.sides, identity, self._finish
        )

    def _forget_tokens(self) -> None:
        """Drops what was made with the vocabularies before, which were replaced."""

    def _finish(self, batch: Batch) -> Batch:
        """Returns the arrays of a batch as the task reads them."""
        return batch

    def row_groups(self) -> Sequence[Group] | None:
        """Returns the training rows by language; None if they are not known in advance."""
        return self.table("train").groups

    @functools.cached_property
    def _own_rows(self) -> Callable[[int], np.ndarray | None] | None:
        if self.own_rows is None:
            return None
        found = [self.own_rows(self.specs_of(bucket)) for bucket in self.buckets]
        return found.__getitem__


class PairInput(PackedInput):
    """Packs sentence pairs. Batches are described in `stream.Assembly.batch`."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("source_length", 256, "K: source positions of a row.", minimum=1)
        p.define(
            "target_length",
            256,
            "L: target positions of a row. Rows fill best if L / K is the data's ratio of target "
            "to source tokens.",
            minimum=2,
        )
        return p

    @classmethod
    def buckets_of(cls, params: Params) -> list[mixture_plan.Bucket]:
        """Returns the one bucket."""
        return [(params.batch_rows, params.source_length, params.target_length)]

    @classmethod
    def specs_of(cls, bucket: mixture_plan.Bucket) -> dict[str, tf.TensorSpec]:
        rows, source_length, target_length = bucket
        source = tf.TensorSpec((rows, source_length), tf.int32)
        target = tf.TensorSpec((rows, target_length), tf.int32)
        sources = {f"source_{part}": source for part in ("ids", "positions", "segments")}
        target_parts = ("inputs", "labels", "positions", "segments")
        return sources | {f"target_{part}": target for part in target_parts}

    # The vocabularies of source and target; subclasses replace it by a property.
    _vocabularies: tuple[Vocabulary, Vocabulary]

    @property
    def source_vocabulary(self) -> Vocabulary:
        """The vocabulary of the source; the same object as the target's if they are joint."""
        return self._vocabularies[0]

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The vocabulary of the target."""
        return self._vocabularies[1]

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        source, target = params.vocabulary.cls.configured_sizes(params.vocabulary)
        return {"source": source, "target": target}

    def vocabulary_sizes(self) -> dict[str, int]:
        """Returns the sizes of the vocabularies of source and target."""
        return {"source": self.source_vocabulary.size, "target": self.target_vocabulary.size}

    @property
    def text_ids(self) -> TextIds:
        target = self.target_vocabulary
        return TextIds(target.target_start, target.end_ids, target.pad_id)

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        files.save_pair(os.fspath(directory), *self._vocabularies)

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        self._vocabularies = files.load_pair(os.fspath(directory))
        self._forget_tokens()

    @property
    def sides(self) -> dict[str, tuple[str, Vocabulary]]:
        return {
            "source": ("source_ids", self.source_vocabulary),
            "target": ("target_inputs", self.target_vocabulary),
        }

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> mixture_plan.Pieces:
        """Returns each row as one piece."""
        return mixture_plan.whole_rows(rows, lengths)

    @property
    def before(self) -> int:
        return self.target_vocabulary.target_start[0]

    def tokenized(self, rows: Sequence[Row]) -> MemoryTable:
        """Returns the tokens of rows, which keep their order if they are of one language."""
        source, target = self._vocabularies
        sources = encode([row.source for row in rows], source, first=source.source_start)
        targets = encode([row.target for row in rows], target, first=target.target_start[1:])
        return MemoryTable(sources, targets, [row.language for row in rows])

    def pack_rows(self, rows: Sequence[Row]) -> tuple[Iterator[Batch], int]:
        """Packs given rows into batches of the longest bucket.

        Returns:
          The batches, and the number of rows left out because they are longer than a batch's row.
        """
        table = self.tokenized(rows)
        lengths = table.lengths_of(np.arange(len(table)))
        too_long = int(np.count_nonzero(mixture_plan.bucket_of(lengths, self.buckets[-1:]) < 0))
        return self.pack_table(table), too_long


@dataclasses.dataclass(frozen=True)
class TextSize:
    """Amount of text in a split after cleaning.

    Attributes:
      bytes: bytes of the documents' UTF-8 text.
      words: number of words, separated by white space.
    """

    documents: int
    bytes: int
    words: int


class TextInput(PackedInput):
    """Packs texts. Those longer than a row are cut into windows; shorter ones share rows.

    Each text ends with EOS. Batches are described in `stream.Assembly.batch`.
    """

    # The vocabulary; subclasses replace it by a property.
    vocabulary: Vocabulary

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("length", 256, "L: positions of a row.", minimum=2)
        return p

    @classmethod
    def buckets_of(cls, params: Params) -> list[mixture_plan.Bucket]:
        """Returns the one bucket."""
        return [(params.batch_rows, params.length, params.length)]

    @classmethod
    def specs_of(cls, bucket: mixture_plan.Bucket) -> dict[str, tf.TensorSpec]:
        spec = tf.TensorSpec((bucket[0], bucket[2]), tf.int32)
        return {f"target_{part}": spec for part in ("inputs", "labels", "positions", "segments")}

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the vocabulary size that the Params ask for."""
        return {"text": params.vocabulary.cls.configured_sizes(params.vocabulary)[0]}

    def vocabulary_sizes(self) -> dict[str, int]:
        """Returns the size of the vocabulary."""
        return {"text": self.vocabulary.size}

    @property
    def text_ids(self) -> TextIds:
        vocabulary = self.vocabulary
        return TextIds((vocabulary.bos_id,), vocabulary.end_ids, vocabulary.pad_id)

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        self.vocabulary.save(os.fspath(directory))

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        self.vocabulary = files.load_vocabulary(os.fspath(directory))
        self._forget_tokens()

    @property
    def sides(self) -> dict[str, tuple[str, Vocabulary]]:
        return {"target": ("target_inputs", self.vocabulary)}

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> mixture_plan.Pieces:
        """Returns windows of rows. Every token is predicted once, from the tokens before it."""
        return mixture_plan.windows(rows, lengths, self.p.length)

    @property
    def before(self) -> int:
        return self.vocabulary.bos_id

    def tokenized(self, rows: Sequence[Row], progress: Progress = SILENT) -> MemoryTable:
        """Returns the tokens of rows, which keep their order if they are of one language.

        Args:
          rows: texts without sources.
        """
        texts = encode([row.target for row in rows], self.vocabulary, progress)
        no_sources = Tokens.of(np.zeros(0, np.int32), np.zeros(len(rows), np.int64))
        return MemoryTable(no_sources, texts, [row.language for row in rows])

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


EncodeBatch = Callable[[Sequence[str]], list[list[int]]]

_ENCODED_AT_A_TIME = 10_000


def encode(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    progress: Progress = SILENT,
    first: Sequence[int] = (),
    encode_batch: EncodeBatch | None = None,
) -> Tokens:
    """Returns the ids of texts, each followed by EOS. Repeated texts are encoded once.

    Args:
      first: ids that each text begins with.
      encode_batch: encodes in place of `vocabulary.encode_batch`.
    """
    encode_batch = encode_batch or vocabulary.encode_batch
    numbers = dict(zip(dict.fromkeys(texts), itertools.count(), strict=False))
    unique = list(numbers)
    parts = []
    # In parts, since lists of Python integers of millions of lines would take gigabytes.
    for begin in range(0, len(unique), _ENCODED_AT_A_TIME):
        progress.update(begin, begin / len(unique))
        encoded = encode_batch(unique[begin : begin + _ENCODED_AT_A_TIME])
        if first:
            encoded = [[*first, *ids] for ids in encoded]
        parts.append(Tokens.concatenate(encoded).with_end(vocabulary.eos_id))
    chosen = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
    return Tokens.join(parts).take(chosen)
