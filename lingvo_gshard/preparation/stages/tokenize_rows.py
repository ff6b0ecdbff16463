"""Tokenizes the rows of a bucket."""

from __future__ import annotations

import dataclasses
import itertools
from typing import IO

import msgspec
import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.vocabularies.files import load_pair
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages import find_leaks, find_near_copies
from lingvo_gshard.preparation.stages.bucket_tasks import BucketTask
from lingvo_gshard.preparation.stages.tally import Tally
from lingvo_gshard.preparation.stages.unique_rows import KeptRow, read_group

STAGE = "5-tokens"
_ROWS_AT_A_TIME = 4096


class TokenGroup(msgspec.Struct, kw_only=True):
    """Records of a bucket with the same split, language and source.

    Attributes:
      split: the split.
      language: language of the rows.
      source: name of the source.
      rows: number of rows.
      begin: first byte in the bucket's file.
    """

    split: str
    language: str
    source: str
    rows: int
    begin: int


class TokensRecord(msgspec.Struct):
    """The tokenized rows of a bucket.

    Attributes:
      groups: the rows.
      tally: the near duplicates, and the rows that were held out and leak.
    """

    groups: list[TokenGroup]
    tally: Tally


def tokens_file(bucket: int) -> str:
    """Returns the name of a bucket's tokens in the work directory."""
    return f"{STAGE}/{bucket:06d}.tokens"


@dataclasses.dataclass(frozen=True)
class TokenizeBucket(BucketTask):
    """Tokenizes one bucket.

    Attributes:
      id_bytes: bytes of an integer of a record.
      paths: the raw file of each part, for examples of rows left out.
      buckets: number of buckets.
    """

    id_bytes: int
    paths: tuple[str, ...]
    buckets: int

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/{self.bucket:06d}"

    def run(self, job: Job, progress: Progress) -> TokensRecord:
        """Writes the tokens. Returns where each group begins, and counts of rows left out."""
        sides = load_pair(job.local_output)
        record, done = TokensRecord([], Tally()), 0
        is_held_out = any(find_leaks.can_leak(group) for group in self.groups)
        leaks = find_leaks.Leaks(job) if is_held_out else None
        copies = None
        if job.cleaner.near_duplicates.is_on:
            copies = find_near_copies.NearCopies(job, self.bucket, self.buckets)
        with job.work.writing(tokens_file(self.bucket)) as file:
            for group in self.groups:
                rows = read_group(job, self.bucket, group)
                if leaks and find_leaks.can_leak(group):
                    rows = leaks.without(group, rows, self.paths, record.tally)
                if copies and group.split == "train":
                    rows = copies.without(group, rows, self.paths, record.tally)
                record.groups.append(
                    TokenGroup(
                        split=group.split,
                        language=group.language,
                        source=group.source,
                        rows=len(rows),
                        begin=file.tell(),
                    )
                )
                encoded = []
                for begin in range(0, len(rows), _ROWS_AT_A_TIME):
                    batch = rows[begin : begin + _ROWS_AT_A_TIME]
                    encoded.append(_encode(batch, *sides))
                    done += len(batch)
                    progress(len(batch), done / max(1, self.rows))
                _write(file, encoded, self.id_bytes)
        return record


def _encode(
    rows: list[KeptRow], source: Vocabulary, target: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths of rows, with columns for source and target, and all of their records.

    A record is as `data.prepared.record` describes it.
    """
    targets = target.encode_batch([row.target for row in rows], num_threads=1)
    has_source = any(row.source for row in rows)
    sources = [[]] * len(rows)
    if has_source:
        sources = source.encode_batch([row.source for row in rows], num_threads=1)
    start, end = list(source.source_start), [source.eos_id] if has_source else []
    first, last = list(target.target_start[1:]), [target.eos_id]
    sources = [[*start, *ids, *end] for ids in sources]
    targets = [[*first, *ids, *last] for ids in targets]
    lengths = np.array([list(map(len, sources)), list(map(len, targets))], "<u4").T
    parts = zip(([len(ids)] for ids in sources), sources, targets, strict=True)
    flat = itertools.chain.from_iterable(itertools.chain.from_iterable(parts))
    return lengths, np.fromiter(flat, "<u4", int(lengths.sum()) + len(rows))


def _write(file: IO[bytes], encoded: list[tuple[np.ndarray, np.ndarray]], id_bytes: int) -> None:
    for lengths, _ in encoded:
        file.write(lengths.tobytes())
    for _, records in encoded:
        if len(records) and int(records.max()) >= 1 << (8 * id_bytes):
            raise UserError(
                f"A row has {int(records.max()):,} source tokens; a record holds at most "
                f"{(1 << (8 * id_bytes)) - 1:,}. Lower cleaning.max_characters"
            )
        file.write(records.astype(f"<u{id_bytes}").tobytes())
