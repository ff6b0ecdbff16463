"""PreparedTranslationInput: packed batches of sentence pairs that gshard-prepare has tokenized."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import Batch
from lingvo_gshard.data.corpus_input import encode
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.prepared import manifest
from lingvo_gshard.data.prepared.base_input import PreparedInput
from lingvo_gshard.data.prepared.mixture_plan import Bucket, Pieces, whole_rows
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary


class PreparedTranslationInput(PreparedInput):
    """Mixes and packs sentence pairs. Batches are described in `packing.pack`."""

    content = manifest.PAIRS
    _limited_sides = ("source", "target")

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
        p.define(
            "short_buckets",
            (),
            "Triples (rows, source length, target length) of further shapes of batches, for pairs "
            "that fit. A step is compiled for each. Pairs go to the shortest bucket that holds "
            "them.",
        )
        p.define(
            "source_vocabulary_size",
            0,
            "Ids of the source that planning assumes where the directory is not there.",
            minimum=0,
        )
        p.define(
            "target_vocabulary_size",
            0,
            "Ids of the target that planning assumes where the directory is not there.",
            minimum=0,
        )
        return p

    @classmethod
    def buckets_of(cls, params: Params) -> list[Bucket]:
        """Returns rows, source length and target length of each bucket, the shortest first."""
        longest = params.batch_rows, params.source_length, params.target_length
        try:
            shorter = [tuple(map(int, bucket)) for bucket in params.short_buckets]
            is_right = all(len(bucket) == 3 and min(bucket) >= 1 for bucket in shorter)
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise UserError(
                f"short_buckets is {params.short_buckets!r}; a tuple of triples (rows, source "
                "length, target length) was expected, such as ((64, 32, 16),)"
            )
        ordered = [*sorted(shorter, key=lambda bucket: bucket[1:]), longest]
        for bucket, longer in zip(ordered, ordered[1:], strict=False):
            if bucket[1] > longer[1] or bucket[2] > longer[2] or bucket[1:] == longer[1:]:
                raise UserError(
                    f"short_buckets: rows of {bucket[1]}, {bucket[2]} do not fit into those of "
                    f"{longer[1]}, {longer[2]}"
                )
        return ordered  # pyright: ignore[reportReturnType]

    @classmethod
    def specs_of(cls, bucket: Bucket) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch of a bucket."""
        rows, source_length, target_length = bucket
        source = tf.TensorSpec((rows, source_length), tf.int32)
        target = tf.TensorSpec((rows, target_length), tf.int32)
        sources = {f"source_{part}": source for part in ("ids", "positions", "segments")}
        target_parts = ("inputs", "labels", "positions", "segments")
        return sources | {f"target_{part}": target for part in target_parts}

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the sizes that the manifest or else the Params have."""
        by_side = {
            entry.side: entry.size for entry in manifest.described_vocabularies(params.directory)
        }
        joint = by_side.get(manifest.JOINT)
        return {
            side: by_side.get(side, joint) or params.get(f"{side}_vocabulary_size")
            for side in ("source", "target")
        }

    def vocabulary_sizes(self) -> dict[str, int]:
        """Returns the sizes of the vocabularies of source and target."""
        return {"source": self.source_vocabulary.size, "target": self.target_vocabulary.size}

    @functools.cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        found = self._prepared_vocabularies
        return found["source"], found["target"]

    @property
    def source_vocabulary(self) -> Vocabulary:
        """The vocabulary of the source; the same object as the target's if they are joint."""
        return self._vocabularies[0]

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The vocabulary of the target."""
        return self._vocabularies[1]

    @property
    def text_ids(self) -> TextIds:
        """The ids around a translation."""
        target = self.target_vocabulary
        return TextIds(target.target_start, target.end_ids, target.pad_id)

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        """Writes the vocabularies into a directory, such as a checkpoint's."""
        files.save_pair(os.fspath(directory), *self._vocabularies)

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the vocabularies by saved ones."""
        self._vocabularies = files.load_pair(os.fspath(directory))

    @property
    def sides(self) -> dict[str, tuple[str, Vocabulary]]:
        """The sides of a batch -> the ids that layers get, and their vocabulary."""
        return {
            "source": ("source_ids", self.source_vocabulary),
            "target": ("target_inputs", self.target_vocabulary),
        }

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> Pieces:
        """Returns each row as one piece."""
        return whole_rows(rows, lengths)

    @property
    def languages(self) -> tuple[str, ...]:
        """The source languages of the training rows, sorted."""
        return tuple(sorted({group.language for group in self.table("train").groups}))

    def pack_rows(self, rows: Sequence[Row]) -> tuple[Iterator[Batch], int]:
        """Packs given rows into batches of the longest bucket, in their order.

        Returns:
          The batches, and the number of rows left out because they are longer than a batch's row.
        """
        source, target = self._vocabularies
        sources = encode([row.source for row in rows], source, first=source.source_start)
        targets = encode([row.target for row in rows], target, first=target.target_start[1:])
        bucket = self.buckets[-1]
        fits = (sources.lengths <= bucket[1]) & (targets.lengths <= bucket[2])
        pairs = packing.SentencePairs(sources, targets, bucket, self._before)
        kept = np.flatnonzero(fits)
        return packing.in_order(pairs, kept), len(rows) - len(kept)

    @property
    def _before(self) -> int:
        return self.target_vocabulary.target_start[0]
