"""Removes the duplicates of a bucket, and groups its rows by split, language and source.

MinHash gives each row some keys, and similar rows share keys. Ranges of keys are worked on one by
one. First the keys that several rows have are found; then the rows that have such a key are brought
together and compared. So only keys, and texts of candidates, are written a second time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import Progress
from lingvo_gshard.data import Row
from lingvo_gshard.wings.preparation import read_rows, row_files
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import are_in, runs
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.part_readers import Part
from lingvo_gshard.wings.preparation.row_files import (
    Example,
    Group,
    Groups,
    KeptRow,
    KeyedRow,
    Tally,
    bucket_file,
    read_group,
)


class BucketRecord(msgspec.Struct):
    """The groups of rows of a bucket that were kept, and counts of its duplicates."""

    tally: Tally
    groups: list[Group]


# A part, and the number of its files of rows.
PartFiles = tuple[Part, int]


def remove_duplicates(
    task: Task,
    job: Job,
    progress: Progress,
    bucket: int,
    ranges: tuple[int, int],
    parts: Sequence[PartFiles],
) -> BucketRecord:
    """Removes the duplicates of a bucket. The first row in the order of the sources stays.

    `ranges` are its first range of digests, and the range after its last one. `parts` are all parts
    in their order. Returns where the groups of the rows that stay are, and counts of duplicates.
    """
    tally, seen = Tally(), set()
    groups: dict[tuple[str, str, str, bool], list[tuple[bytes, KeptRow]]] = collections.defaultdict(
        list
    )
    for part, row in _rows(job, ranges, parts):
        if row.digest in seen:
            path, text = part.spans[0].path, row.source or row.target
            example = Example.of_row(part.number, path, row.line, text)
            tally.leave_out(near_duplicates.DUPLICATE, row.language, example)
            continue
        seen.add(row.digest)
        kept = KeptRow(row.source, row.target, part.number, row.line)
        source = job.sources[part.source]
        key = row.split, row.language, source.name, not source.split
        groups[key].append((row.digest, kept))
        if len(seen) % 4096 == 0:
            progress.update(len(seen), len(seen) / max(task.rows, len(seen)))
    progress.update(len(seen), 1.0)
    record = BucketRecord(tally, [])
    with job.work.writing(bucket_file(bucket)) as file:
        for key, rows in sorted(groups.items(), key=lambda item: item[0]):
            split, language, source, is_divided = key
            rows.sort(key=lambda row: row[0])
            content = msgspec.msgpack.encode([kept for _, kept in rows])
            record.groups.append(
                Group(
                    split=split,
                    language=language,
                    source=source,
                    is_divided=is_divided,
                    rows=len(rows),
                    characters=sum(len(row.source) + len(row.target) for _, row in rows),
                    begin=file.tell(),
                    size=len(content),
                )
            )
            file.write(content)
    return record


def _rows(
    job: Job, ranges: tuple[int, int], parts: Sequence[PartFiles]
) -> Iterator[tuple[Part, KeyedRow]]:
    for part, chunks in parts:
        for chunk in range(chunks):
            path = job.work.file(read_rows.chunk_file(part.number, chunk))
            for row in row_files.read_rows(path, *ranges):
                yield part, row


NEAR_STAGE = "3-near"
# A candidate: key, place in the sources, number in the bucket, and place of the text in the file.
_CANDIDATE = np.dtype(
    [("key", "<u8"), ("part", "<u4"), ("line", "<u8"), ("bucket", "<u4"), ("number", "<u8")]
    + [("begin", "<u8"), ("size", "<u4")]
)
# Rows with the same key are in the order of the sources. Buckets follow each other by digests.
_ORDER = ("key", "part", "line", "bucket", "number")
# Names of files, without the number of their bucket or of their range of keys.
_KEYS, _COMMON, _CANDIDATES, _COPIES = (
    f"{NEAR_STAGE}/{kind}-" for kind in ("keys", "common", "candidates", "copies")
)


def near_copies_tasks(job: Job, buckets: Groups) -> list[list[Task]]:
    """Returns the tasks that find near duplicates among training rows, step by step."""
    ranges = _ranges_of(job, len(buckets))
    rows = sum(map(row_files.rows_in, buckets)) // ranges + 1

    def by_range(files: str, function: Callable[..., None]) -> list[Task]:
        return [
            Task(f"{files}{number:06d}", rows, function, (number, ranges, len(buckets)))
            for number in range(ranges)
        ]

    return [
        tasks_by_bucket(_KEYS, _write_keys, buckets),
        by_range(_COMMON, _find_common_keys),
        tasks_by_bucket(_CANDIDATES, _collect_candidates, buckets, ranges),
        by_range(_COPIES, _compare_candidates),
    ]


def tasks_by_bucket(
    files: str, function: Callable[..., Any], buckets: Groups, *rest: Any
) -> list[Task]:
    """Returns a task for each bucket; the function takes its number, its groups and the rest."""
    return [
        Task(f"{files}{bucket:06d}", row_files.rows_in(groups), function, (bucket, groups, *rest))
        for bucket, groups in enumerate(buckets)
    ]


def _write_keys(
    task: Task, job: Job, progress: Progress, bucket: int, groups: Sequence[Group]
) -> None:
    """Writes the sorted keys of the training rows of a bucket."""
    keys = [np.zeros(0, np.uint64)]
    for _, _, texts in row_files.batches(job, progress, bucket, groups):
        keys.append(job.cleaner.near_duplicates.bands(texts).ravel())
    job.work.save_array(task.name, np.sort(np.concatenate(keys)))


def _load(job: Job, files: str, number: int, ranges: int, buckets: int) -> np.ndarray:
    """Returns what the files of all buckets have in a range: sorted keys, or candidates by key."""
    limits = _limits(ranges)[number : number + 2]
    found = []
    for bucket in range(buckets):
        part = job.work.shared_array(f"{files}{bucket:06d}")
        first, last = np.searchsorted(part["key"] if part.dtype.names else part, limits)
        found.append(np.asarray(part[first : last if number + 1 < ranges else None]))
    return np.concatenate(found)


def _find_common_keys(
    task: Task, job: Job, progress: Progress, number: int, ranges: int, buckets: int
) -> None:
    """Writes the keys of a range that several rows share, sorted."""
    unique, counts = np.unique(_load(job, _KEYS, number, ranges, buckets), return_counts=True)
    job.work.save_array(task.name, unique[counts > 1])
    progress.update(task.rows, 1.0)


def _collect_candidates(
    task: Task, job: Job, progress: Progress, bucket: int, groups: Sequence[Group], ranges: int
) -> None:
    """Writes the rows of a bucket that have a key in common with others.

    One file has their texts. Another has, for each key, where its text is, ordered by key.
    """
    # Ranges follow each other, so the whole is sorted.
    common = np.concatenate(
        [job.work.shared_array(f"{_COMMON}{number:06d}") for number in range(ranges)]
    )
    candidates, begin = [], 0
    with job.work.writing(f"{task.name}.texts") as file:
        for first, rows, texts in row_files.batches(job, progress, bucket, groups):
            keys = job.cleaner.near_duplicates.bands(texts)
            is_common = are_in(common, keys)
            for index in np.flatnonzero(is_common.any(axis=1)).tolist():
                row, number = rows[index], first + index
                content = msgspec.msgpack.encode(texts[index][:3])
                place = row.part, row.line, bucket, number, begin, len(content)
                candidates += [(k, *place) for k in keys[index, is_common[index]].tolist()]
                begin += file.write(content)
    job.work.save_array(task.name, np.sort(np.array(candidates, _CANDIDATE), order="key"))


def _compare_candidates(
    task: Task, job: Job, progress: Progress, number: int, ranges: int, buckets: int
) -> None:
    """Compares candidates that share a key of a range; writes bucket and number of the copies."""
    candidates = np.sort(_load(job, _CANDIDATES, number, ranges, buckets), order=_ORDER)
    texts = [_texts_of(job, bucket) for bucket in range(buckets)]
    copies = [np.zeros((0, 2), np.uint64)]
    for begin, end in runs(candidates["key"]):
        rows = candidates[begin:end]
        near = job.cleaner.near_duplicates.copies(_row(texts, row) for row in rows)
        copies.append(np.stack([rows["bucket"][near], rows["number"][near]], axis=1))
    job.work.save_array(task.name, np.unique(np.concatenate(copies).astype(np.uint64), axis=0))
    progress.update(task.rows, 1.0)


def near_copies(job: Job, bucket: int, buckets: int) -> set[int]:
    """Returns the numbers of the near duplicates among the training rows of a bucket."""
    found = set()
    for number in range(_ranges_of(job, buckets)):
        copies = job.work.shared_array(f"{_COPIES}{number:06d}")
        found.update(copies[copies[:, 0] == bucket, 1].tolist())
    return found


def _ranges_of(job: Job, buckets: int) -> int:
    """Returns the number of ranges of keys: one for each bucket if all rows are candidates."""
    return buckets * job.cleaner.near_duplicates.bands_of_row


def _texts_of(job: Job, bucket: int) -> np.ndarray:
    """Returns the bytes of all texts of candidates of a bucket, read when they are needed."""
    path = job.work.file(f"{_CANDIDATES}{bucket:06d}.texts")
    # An empty file cannot be mapped into memory.
    return np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def _row(texts: Sequence[np.ndarray], candidate: np.void) -> Row:
    begin, size = int(candidate["begin"]), int(candidate["size"])
    content = texts[int(candidate["bucket"])][begin : begin + size].tobytes()
    return Row(*msgspec.msgpack.decode(content))


def _limits(ranges: int) -> np.ndarray:
    """Returns the smallest key of each range and, for the last one, the largest of all."""
    steps = [(number << 64) // ranges for number in range(ranges)]
    return np.array([*steps, (1 << 64) - 1], np.uint64)


LEAK_STAGE = "3-in-train"


def search_tasks(
    stage: str, hashes_of: Callable[[Sequence[Row]], np.ndarray], held_out: Groups, train: Groups
) -> list[list[Task]]:
    """Returns the tasks that look for hashes of rows held out in training, step by step.

    `stage` names them for `found_in_train`. `hashes_of` returns hashes of rows, uint64.
    """
    rows = sum(map(row_files.rows_in, held_out))
    return [
        [Task(f"{stage}/wanted", rows, _collect_wanted, (hashes_of, held_out))],
        tasks_by_bucket(f"{stage}/", _look_through, train, f"{stage}/wanted", hashes_of),
        [Task(f"{stage}/seen", 1, _merge_seen, (stage, len(train)))],
    ]


def _collect_wanted(
    task: Task, job: Job, progress: Progress, hashes_of: Callable[..., np.ndarray], buckets: Groups
) -> None:
    found, done = [np.zeros(0, np.uint64)], 0
    for bucket, groups in enumerate(buckets):
        rows = [group.to_row(row) for group in groups for row in read_group(job, bucket, group)]
        found.append(np.unique(hashes_of(rows)))
        done += len(rows)
        progress.update(done, done / max(1, task.rows))
    job.work.save_array(task.name, np.unique(np.concatenate(found)))


def _look_through(
    task: Task,
    job: Job,
    progress: Progress,
    bucket: int,
    groups: Sequence[Group],
    wanted_name: str,
    hashes_of: Callable[..., np.ndarray],
) -> None:
    """Writes the wanted hashes that training rows of a bucket have, sorted."""
    wanted, found = job.work.shared_array(wanted_name), [np.zeros(0, np.uint64)]
    for _, _, texts in row_files.batches(job, progress, bucket, groups):
        hashes = np.unique(hashes_of(texts))
        found.append(hashes[are_in(wanted, hashes)])
    job.work.save_array(task.name, np.unique(np.concatenate(found)))


def _merge_seen(task: Task, job: Job, progress: Progress, stage: str, buckets: int) -> None:
    """Writes the wanted hashes that training rows of any bucket have, sorted."""
    del progress
    wanted = job.work.shared_array(f"{stage}/wanted")
    is_seen = np.zeros(len(wanted), bool)
    for bucket in range(buckets):
        is_seen[np.searchsorted(wanted, job.work.shared_array(f"{stage}/{bucket:06d}"))] = True
    job.work.save_array(task.name, wanted[is_seen])


def found_in_train(job: Job, stage: str) -> np.ndarray:
    """Returns the hashes that the tasks of a search have found in training, sorted."""
    return job.work.shared_array(f"{stage}/seen")


def can_leak(group: Group) -> bool:
    """Returns whether a group was held out by a hash; a test set that was given stays as it is."""
    return group.is_divided and group.split != "train"
