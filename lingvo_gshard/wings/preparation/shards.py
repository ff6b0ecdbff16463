"""Tokenizes the rows of a bucket."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec
import numpy as np

from lingvo_gshard.core import Progress, UserError
from lingvo_gshard.data import Vocabulary, load_pair
from lingvo_gshard.wings.preparation import duplicates, row_files, token_ids
from lingvo_gshard.wings.preparation.cleaning.leaks import reasons_against
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import NEAR_DUPLICATE
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.prepared.manifest import Shard
from lingvo_gshard.wings.preparation.prepared.shard_writer import (
    PAIRS_PER_GROUP,
    TEXTS_PER_GROUP,
    ShardWriter,
)

TOKEN_STAGE = "5-tokens"
_ROWS_AT_A_TIME = 4096


class TokensRecord(msgspec.Struct):
    """The places of the tokenized rows of a bucket, and counts of rows that were left out."""

    groups: list[row_files.GroupPlace]
    tally: row_files.Tally


def tokens_file(bucket: int) -> str:
    """Returns the name of a bucket's tokens in the work directory."""
    return f"{TOKEN_STAGE}/{bucket:06d}.tokens"


def tokenize(
    task: Task,
    job: Job,
    progress: Progress,
    bucket: int,
    groups: Sequence[row_files.Group],
    paths: Sequence[str],
    buckets: int,
    id_bytes: int,
) -> TokensRecord:
    """Writes the tokens of a bucket. Returns where its groups begin, and counts of rows left out.

    `paths` are the raw files of the parts, for examples. Integers of a record have `id_bytes`.
    """
    sides = load_pair(job.local_output)
    record, done = TokensRecord([], row_files.Tally()), 0
    in_train, copies, trained = None, set(), 0
    if any(map(duplicates.can_leak, groups)):
        in_train = duplicates.found_in_train(job, duplicates.LEAK_STAGE)
    if job.cleaner.near_duplicates.is_on:
        copies = duplicates.near_copies(job, bucket, buckets)
    with job.work.writing(tokens_file(bucket)) as file:
        for group in groups:
            rows, reasons = row_files.read_group(job, bucket, group), None
            if in_train is not None and duplicates.can_leak(group):
                reasons = reasons_against(list(map(group.to_row, rows)), in_train)
            elif copies and group.split == "train":
                numbers = range(trained, trained + len(rows))
                reasons = [NEAR_DUPLICATE if number in copies else "" for number in numbers]
                trained += len(rows)
            if reasons:
                rows = _kept(group, rows, reasons, paths, record.tally)
            record.groups.append(
                row_files.GroupPlace(
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
                encoded.append(_encode(batch, job.sources[0].has_ids, *sides))
                done += len(batch)
                progress.update(done, done / max(1, task.rows))
            _write(file, encoded, id_bytes)
    return record


def _kept(
    group: row_files.Group,
    rows: Sequence[row_files.KeptRow],
    reasons: Sequence[str],
    paths: Sequence[str],
    tally: row_files.Tally,
) -> list[row_files.KeptRow]:
    """Returns the rows of a group without a reason to leave them out, and counts the others."""
    for row, reason in zip(rows, reasons, strict=True):
        if reason:
            # A row that was held out is told by its target, which all languages share.
            text = row.source if group.split == "train" else ""
            example = row_files.Example.of_row(
                row.part, paths[row.part], row.line, text or row.target
            )
            tally.leave_out(reason, group.language, example)
    return [row for row, reason in zip(rows, reasons, strict=True) if not reason]


def _encode(
    rows: list[row_files.KeptRow], has_ids: bool, source: Vocabulary, target: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths of rows, with columns for source and target, and all of their records."""
    has_source = any(row.source for row in rows)
    texts = [row.source for row in rows if has_source], [row.target for row in rows]
    if has_ids:
        sources = token_ids.of_texts(texts[0], source.source_start, source.eos_id)
        targets = token_ids.of_texts(texts[1], target.target_start, target.eos_id)
    else:
        sources = source.encode_batch(texts[0], num_threads=1) if has_source else []
        targets = target.encode_batch(texts[1], num_threads=1)
    sources = sources or [[]] * len(rows)
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


SHARD_STAGE = "6-shards"
_ROWS_BETWEEN_UPDATES = 4096


class Segment(msgspec.Struct, frozen=True):
    """Rows of a shard that are in one bucket: `rows` rows of a group, from its row `first` on."""

    bucket: int
    group: row_files.GroupPlace
    first: int
    rows: int


def write_shard(
    task: Task,
    job: Job,
    progress: Progress,
    place: tuple[int, int],
    segments: Sequence[Segment],
    id_bytes: int,
) -> Shard:
    """Writes a shard and returns its entry of the manifest.

    `place` is its number among the shards with its split, language and source, and their number.
    """
    group, done = segments[0].group, 0
    with ShardWriter(
        job.local_output,
        group.split,
        group.language,
        group.source,
        number=place[0],
        count=place[1],
        rows_per_group=TEXTS_PER_GROUP if job.is_text else PAIRS_PER_GROUP,
    ) as writer:
        for segment in segments:
            for record, lengths in _records(job, segment, id_bytes):
                writer.write_record(record, *lengths)
                done += 1
                if done % _ROWS_BETWEEN_UPDATES == 0:
                    progress.update(done, done / task.rows)
        progress.update(done, 1.0)
        shard = writer.close()
    job.deliver(shard.lengths, shard.file)
    if job.local_output != job.output:
        for name in (shard.lengths, shard.file):
            os.unlink(f"{job.local_output}/{name}")
    return shard


def shards_of(
    groups: list[tuple[int, row_files.GroupPlace]], shard_rows: int, id_bytes: int
) -> Iterator[Task]:
    """Yields the tasks that write shards of groups with the same split, language and source.

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
        first = segments[0].group
        names = f"{first.split}-{first.language}-{first.source}"
        name = f"{SHARD_STAGE}/{names}-{number:05d}-of-{count:05d}"
        yield Task(name, end - begin, write_shard, ((number, count), segments, id_bytes))


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
