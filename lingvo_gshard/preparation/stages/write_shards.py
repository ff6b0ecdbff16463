"""Writes the shards of prepared data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import msgspec
import numpy as np

from lingvo_gshard.data.prepared.manifest import Shard
from lingvo_gshard.data.prepared.shard_writer import (
    PAIRS_PER_GROUP,
    TEXTS_PER_GROUP,
    ShardWriter,
)
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages.tokenize_rows import TokenGroup, tokens_file

STAGE = "6-shards"
_ROWS_BETWEEN_UPDATES = 4096


class Segment(msgspec.Struct, frozen=True):
    """Rows of a shard that are in one bucket.

    Attributes:
      bucket: number of the bucket.
      group: the group that they belong to.
      first: number of the first row within the group.
      rows: number of rows.
    """

    bucket: int
    group: TokenGroup
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class WriteShard:
    """Writes one shard.

    Attributes:
      number: number of the shard among those with its split, language and source.
      count: number of these shards.
      segments: the rows.
      id_bytes: bytes of an integer of a record.
    """

    number: int
    count: int
    segments: tuple[Segment, ...]
    id_bytes: int

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        group = self.segments[0].group
        names = f"{group.split}-{group.language}-{group.source}"
        return f"{STAGE}/{names}-{self.number:05d}-of-{self.count:05d}"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(segment.rows for segment in self.segments)

    def run(self, job: Job, progress: Progress) -> Shard:
        """Writes the shard and returns its entry of the manifest."""
        group, total, done = self.segments[0].group, self.rows, 0
        with ShardWriter(
            job.local_output,
            group.split,
            group.language,
            group.source,
            number=self.number,
            count=self.count,
            id_bytes=self.id_bytes,
            rows_per_group=TEXTS_PER_GROUP if job.is_text else PAIRS_PER_GROUP,
        ) as writer:
            for segment in self.segments:
                for record, lengths in _records(job, segment, self.id_bytes):
                    writer.write_record(record, *lengths)
                    done += 1
                    if done % _ROWS_BETWEEN_UPDATES == 0:
                        progress(_ROWS_BETWEEN_UPDATES, done / total)
            progress(done % _ROWS_BETWEEN_UPDATES, 1.0)
            shard = writer.close()
        job.deliver(shard.lengths, shard.file)
        if job.local_output != job.output:
            for name in (shard.lengths, shard.file):
                os.unlink(f"{job.local_output}/{name}")
        return shard


def shards_of(
    groups: list[tuple[int, TokenGroup]], shard_rows: int, id_bytes: int
) -> Iterator[WriteShard]:
    """Yields the shards of the groups with the same split, language and source.

    Args:
      groups: (number of the bucket, group) in the order of the buckets.
      shard_rows: largest number of rows of a shard.
      id_bytes: bytes of an integer of a record.
    """
    total = sum(group.rows for _, group in groups)
    count = max(1, -(-total // shard_rows))
    for number in range(count):
        begin, end = total * number // count, total * (number + 1) // count
        segments, before = [], 0
        for bucket, group in groups:
            first = max(begin - before, 0)
            rows = min(end - before, group.rows) - first
            if rows > 0:
                segments.append(Segment(bucket, group, first, rows))
            before += group.rows
        yield WriteShard(number, count, tuple(segments), id_bytes)


def _records(job: Job, segment: Segment, id_bytes: int) -> Iterator[tuple[bytes, list[int]]]:
    """Yields the records of a segment, each with the lengths of source and target."""
    group = segment.group
    with open(job.work.file(tokens_file(segment.bucket)), "rb") as file:
        file.seek(group.begin)
        lengths = np.frombuffer(file.read(8 * group.rows), "<u4").reshape(-1, 2).astype(np.int64)
        ends = np.cumsum(lengths.sum(1) + 1) * id_bytes
        begins = np.concatenate([[0], ends])
        last = segment.first + segment.rows
        file.seek(int(begins[segment.first]), 1)
        content = file.read(int(begins[last] - begins[segment.first]))
    places = (begins[segment.first : last + 1] - begins[segment.first]).tolist()
    for row, pair in enumerate(lengths[segment.first : last].tolist()):
        yield content[places[row] : places[row + 1]], pair
