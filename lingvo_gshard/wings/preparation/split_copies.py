"""Counts rows of dev and test that a user gave and that also stand in another split.

Hashes of the rows of dev and test are collected first. Then training is looked through for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core import Progress
from lingvo_gshard.data import Row, held_out
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import TextHashes, are_in
from lingvo_gshard.wings.preparation.duplicates import found_in_train
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.prepared.manifest import SplitCopies
from lingvo_gshard.wings.preparation.row_files import Example, Group, Groups, read_group

STAGE = "3-copies"
_EXAMPLES = 3
# The parts of a row that are compared: all of it, or texts without case, digits, punctuation.
_KINDS = ("exact", "folded", "source", "target")
_FOLDED, _SOURCE = map(_KINDS.index, ("folded", "source"))
_ROWS_AT_A_TIME = 4096


def is_given(group: Group) -> bool:
    """Returns whether a group is of dev or test, and its user said so."""
    return group.split != "train" and not group.is_divided


def count_copies(
    task: Task, job: Job, progress: Progress, buckets: Groups, paths: Sequence[str]
) -> list[SplitCopies]:
    """Counts the rows of dev and test that stand in train, and rows of test that stand in dev.

    `buckets` has the groups of dev and test, `paths` the raw files of the parts, for examples.
    """
    del task, progress
    known = {"train": found_in_train(job, STAGE)}
    splits = sorted({group.split for groups in buckets for group in groups})

    def hashed(split: str) -> Iterator[tuple[list[Example], np.ndarray]]:
        return _hashed_rows(job, buckets, paths, split)

    if splits == ["dev", "test"]:
        known["dev"] = np.unique(np.concatenate([hashes for _, hashes in hashed("dev")]))
    pairs = [(split, other) for split in splits for other in known if other != split]
    return [_count(job, *pair, hashed(pair[0]), known[pair[1]]) for pair in pairs]


def _hashed_rows(
    job: Job, buckets: Groups, paths: Sequence[str], split: str
) -> Iterator[tuple[list[Example], np.ndarray]]:
    """Yields the rows of each group of a split, as examples, with their hashes."""
    for bucket, groups in enumerate(buckets):
        for group in groups:
            if group.split == split:
                rows = read_group(job, bucket, group)
                shown = [
                    Example.of_row(row.part, paths[row.part], row.line, row.target) for row in rows
                ]
                yield shown, hashes_of(list(map(group.to_row, rows)))


def _count(
    job: Job,
    split: str,
    other: str,
    hashed: Iterable[tuple[list[Example], np.ndarray]],
    known: np.ndarray,
) -> SplitCopies:
    rows, counts = 0, np.zeros(len(_KINDS), np.int64)
    examples: list[Example] = []
    for shown, hashes in hashed:
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


def hashes_of(rows: Sequence[Row]) -> np.ndarray:
    """Returns the hash of each kind of each row, uint64 [N, len(_KINDS)].

    A row without a source has the same hash as its target, so that texts are counted once.
    """
    found = [np.zeros((0, len(_KINDS)), np.uint64)]
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[begin : begin + _ROWS_AT_A_TIME]
        sources, targets = (
            [held_out.fold(row.source) for row in part],
            [held_out.fold(row.target) for row in part],
        )
        # Line ends are in no folded text, so that different kinds are of different texts.
        kinds = (
            [f"{row.language}\n\n\n{row.source}\n\n{row.target}" for row in part],
            [f"{r.language}\n\n{s}\n{t}" for r, s, t in zip(part, sources, targets, strict=True)],
            [f"{row.language}\n{source}" for row, source in zip(part, sources, strict=True)],
            [f"\n{target}" for target in targets],
        )
        found.append(np.stack([TextHashes(texts).whole() for texts in kinds], axis=1))
    return np.concatenate(found)
