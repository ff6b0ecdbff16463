"""Counts rows of dev and test that a user gave and that also stand in another split.

Hashes of the rows of dev and test are collected first. Then training is looked through for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core.progress import Progress
from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import TextHashes, are_in
from lingvo_gshard.wings.preparation.job import Job
from lingvo_gshard.wings.preparation.prepared.manifest import SplitCopies
from lingvo_gshard.wings.preparation.row_files import (
    BucketTask,
    Done,
    Example,
    Group,
    HeldOutTask,
    read_group,
)

STAGE = "3-copies"
_EXAMPLES = 3
# The parts of a row that are compared: all of it, or texts without case, digits, punctuation.
_KINDS = ("exact", "folded", "source", "target")
_FOLDED, _SOURCE = map(_KINDS.index, ("folded", "source"))
_ROWS_AT_A_TIME = 4096


def is_given(group: Group) -> bool:
    """Returns whether a group is of dev or test, and its user said so."""
    return group.split != "train" and not group.is_divided


@dataclasses.dataclass(frozen=True)
class CollectGiven(HeldOutTask):
    """Collects the hashes of the rows of dev and test."""

    name: str = f"{STAGE}/given"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the hashes."""
        found = [np.zeros(0, np.uint64)]
        found += [np.unique(_hashes_of(rows)) for rows in self.texts(job, progress)]
        job.work.save_array(self.name, np.unique(np.concatenate(found)))
        return Done()


@dataclasses.dataclass(frozen=True)
class LookForCopies(BucketTask):
    """Looks for these hashes in the training rows of a bucket."""

    files = f"{STAGE}/"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the hashes that are there."""
        given, found = job.work.shared_array(CollectGiven.name), [np.zeros(0, np.uint64)]
        for batch in self.batches(job, progress):
            hashes = np.unique(_hashes_of(batch.texts))
            found.append(hashes[are_in(given, hashes)])
        job.work.save_array(self.name, np.unique(np.concatenate(found)))
        return Done()


class CopiesRecord(msgspec.Struct):
    """The copies that were counted.

    Attributes:
      copies: one for each two splits.
    """

    copies: list[SplitCopies]


@dataclasses.dataclass(frozen=True)
class CountCopies:
    """Counts the rows of dev and test that stand in train, and rows of test that stand in dev.

    Attributes:
      buckets: the groups of dev and test, by bucket.
      paths: the raw file of each part, for examples.
    """

    buckets: tuple[tuple[Group, ...], ...]
    paths: tuple[str, ...]
    rows: int = 1
    name: str = f"{STAGE}/counted"

    def run(self, job: Job, progress: Progress) -> CopiesRecord:
        """Returns the counts."""
        del progress
        names = [f"{STAGE}/{bucket:06d}.npy" for bucket in range(len(self.buckets))]
        train = [np.load(job.work.file(name)) for name in names]
        known = {"train": np.unique(np.concatenate(train))}
        splits = sorted({group.split for groups in self.buckets for group in groups})
        if splits == ["dev", "test"]:
            dev = [hashes for _, hashes in self._hashes(job, "dev")]
            known["dev"] = np.unique(np.concatenate(dev))
        pairs = [(split, other) for split in splits for other in known if other != split]
        return CopiesRecord([self._count(job, *pair, known[pair[1]]) for pair in pairs])

    def _hashes(self, job: Job, split: str) -> Iterator[tuple[list[Example], np.ndarray]]:
        """Yields the rows of each group of a split, as examples, with their hashes."""
        for bucket, groups in enumerate(self.buckets):
            for group in groups:
                if group.split == split:
                    rows = read_group(job, bucket, group)
                    shown = [
                        Example.of_row(row.part, self.paths[row.part], row.line, row.target)
                        for row in rows
                    ]
                    yield shown, _hashes_of(list(map(group.to_row, rows)))

    def _count(self, job: Job, split: str, other: str, known: np.ndarray) -> SplitCopies:
        rows, counts = 0, np.zeros(len(_KINDS), np.int64)
        examples: list[Example] = []
        for shown, hashes in self._hashes(job, split):
            is_there = are_in(known, hashes)
            if job.is_text:
                is_there[:, _SOURCE] = False
            rows += len(shown)
            counts += is_there.sum(axis=0)
            places = np.flatnonzero(is_there[:, _FOLDED]).tolist()
            examples = sorted([*examples, *(shown[place] for place in places)])[:_EXAMPLES]
        return SplitCopies(
            split=split,
            other=other,
            rows=rows,
            **dict(zip(_KINDS, counts.tolist(), strict=True)),
            examples=[example.text for example in examples],
        )


def problems(found: Sequence[SplitCopies]) -> list[str]:
    """Returns a line for each two splits that share rows."""
    return [_in_words(one) for one in found if one.folded or one.source or one.target]


def _in_words(one: SplitCopies) -> str:
    counts = [f"{one.exact:,} are in {one.other}"]
    counts.append(f"{one.folded:,} but for case, digits and punctuation")
    if one.source:
        counts.append(f"the sources of {one.source:,}")
    counts.append(f"the targets of {one.target:,}")
    example = f", for example {one.examples[0]}" if one.examples else ""
    return f"Of {one.rows:,} rows of {one.split}, {', '.join(counts)}{example}"


def _hashes_of(rows: Sequence[Row]) -> np.ndarray:
    """Returns the hash of each kind of each row, uint64 [N, len(_KINDS)].

    A row without a source has the same hash as its target, so that texts are counted once.
    """
    found = [np.zeros((0, len(_KINDS)), np.uint64)]
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[begin : begin + _ROWS_AT_A_TIME]
        sources, targets = [fold(row.source) for row in part], [fold(row.target) for row in part]
        # Line ends are in no folded text, so that different kinds are of different texts.
        kinds = (
            [f"{row.language}\n\n\n{row.source}\n\n{row.target}" for row in part],
            [f"{r.language}\n\n{s}\n{t}" for r, s, t in zip(part, sources, targets, strict=True)],
            [f"{row.language}\n{source}" for row, source in zip(part, sources, strict=True)],
            [f"\n{target}" for target in targets],
        )
        found.append(np.stack([TextHashes(texts).whole() for texts in kinds], axis=1))
    return np.concatenate(found)
