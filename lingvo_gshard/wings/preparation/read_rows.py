"""Reads, cleans and keys the rows of a part, and writes them in the order of their digests."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core import Progress
from lingvo_gshard.data import CleaningReport, Row, held_out
from lingvo_gshard.wings.preparation import part_readers, row_files
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.part_readers import Part
from lingvo_gshard.wings.preparation.row_files import Example, KeyedRow, Tally

STAGE = "1-rows"
_ROWS_AT_A_TIME = 4096
# Characters of the rows of a chunk. A chunk is kept in memory until it is written.
_CHUNK_CHARACTERS = 16 << 20
_DIGEST_BYTES = 16


class PartRecord(msgspec.Struct):
    """Counts of the rows of a part, of their files, and the bytes of each range of digests."""

    tally: Tally
    chunks: int
    rows: int
    range_bytes: list[int]


def chunk_file(part: int, chunk: int) -> str:
    """Returns the name of a file of rows in the work directory."""
    return f"{STAGE}/{part:06d}-{chunk:06d}.rows"


def read_part(task: Task, job: Job, progress: Progress, part: Part) -> PartRecord:
    """Reads a part, writes its rows and returns the record.

    Raises:
      UserError: a row or a file is bad, and to be refused.
    """
    del task
    source = job.sources[part.source]
    reader = part_readers.make_reader(part, source, job.on_bad_row, job.params.max_line_bytes)
    writer = _ChunkWriter(job, part.number)
    report = CleaningReport()
    if source.has_ids:
        reader.vocabularies = job.params.vocabulary.instantiate().train((), 1.0)
    # The rules of dev leave ids as they are, and drop empty rows.
    clean_row = job.cleaner.rules("dev" if source.has_ids else source.split or "train", report)
    tally = writer.record.tally
    done = 0
    for batch in _batches(reader.part_rows()):
        for row in batch:
            tally.count_read(row.language)
        kept = [clean for row in batch if (clean := clean_row(row)) is not None]
        writer.add(kept, source.split)
        done += len(batch)
        progress.update(done, min(1.0, reader.position / max(1, part.bytes)))
    _count(report, part.number, tally)
    for order, (reason, count) in enumerate(sorted(reader.left_out.items())):
        tally.count_read("", count)
        example = Example(part.number, order, reader.examples[reason])
        tally.leave_out(reason, "", example, count)
    return writer.close()


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
        yield batch


def _count(report: CleaningReport, part: int, tally: Tally) -> None:
    """Counts the rows that cleaning has left out, and the texts it has changed."""
    for (language, reason), count in report.dropped_by_language.items():
        tally.reject(reason, language, count)
    for reason, example in report.examples.items():
        tally.show(reason, Example(part, 0, example))
    for kind, count in report.rewritten.items():
        tally.rewrite(kind, count)


class _ChunkWriter:
    """Keys rows, drops rows that repeat a row of their chunk, and writes chunks."""

    def __init__(self, job: Job, part: int):
        self._job, self._part = job, part
        self._drops = job.cleaner.p.drop_duplicates
        self._per_mille = job.params.held_out_per_mille
        self._rows: dict[bytes, KeyedRow] = {}
        self._characters = 0
        self._range_bytes = np.zeros(row_files.RANGES, np.int64)
        self.record = PartRecord(Tally(), 0, 0, [])

    def add(self, rows: Sequence[Row], split: str) -> None:
        """Adds rows that were cleaned. A hash of their targets chooses their split if it is ""."""
        key = self._job.digest_key
        for row in rows:
            language, source, target, file, line = row
            text = f"{language}\0{source}\0{target}"
            if split or not self._drops:
                # Rows of a test set that was given are kept as they are.
                text = f"{text}\0{split}\0{self._part}\0{line}"
            digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES, key=key).digest()
            if digest in self._rows:
                example = Example.of_row(self._part, file, line, source or target)
                self.record.tally.leave_out(near_duplicates.DUPLICATE, language, example)
                continue
            chosen = split or held_out.split_of(target, self._per_mille)
            self._rows[digest] = KeyedRow(digest, language, source, target, chosen, line)
            self._characters += len(text)
        if self._characters >= _CHUNK_CHARACTERS:
            self._write()

    def close(self) -> PartRecord:
        """Writes what is left and returns the record."""
        if self._rows:
            self._write()
        self.record.range_bytes = self._range_bytes.tolist()
        return self.record

    def _write(self) -> None:
        with self._job.work.writing(chunk_file(self._part, self.record.chunks)) as file:
            self._range_bytes += row_files.write_rows(file, list(self._rows.values()))
        self.record.chunks += 1
        self.record.rows += len(self._rows)
        self._rows, self._characters = {}, 0
