"""Prepares data: runs the stages in order, and goes on where an earlier run was killed."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import (
    SILENT,
    Options,
    Params,
    Progress,
    UserError,
    is_bucket,
    objects,
    option,
    stores,
)
from lingvo_gshard.data import readers
from lingvo_gshard.wings.preparation import (
    duplicates,
    parts,
    preparation,
    read_rows,
    row_files,
    shards,
    split_copies,
    train_vocabulary,
)
from lingvo_gshard.wings.preparation.beam import BeamPool
from lingvo_gshard.wings.preparation.cleaning import leaks
from lingvo_gshard.wings.preparation.inspector import Inspector
from lingvo_gshard.wings.preparation.job import Done, Job, Task, WorkDirectory, check_same
from lingvo_gshard.wings.preparation.part_readers import Part
from lingvo_gshard.wings.preparation.pool import Pool
from lingvo_gshard.wings.preparation.preparation import describe
from lingvo_gshard.wings.preparation.prepared import manifest as manifests
from lingvo_gshard.wings.preparation.prepared.manifest import Manifest
from lingvo_gshard.wings.preparation.row_files import Groups, Tally
from lingvo_gshard.wings.preparation.shards import TokensRecord
from lingvo_gshard.wings.preparation.sources import TABLE, Source, Survey

WORK = ".work"
ON_COPIES = ("count", "refuse")


@dataclasses.dataclass(frozen=True)
class PrepareOptions(Options):
    """Options for the preparation of data. No option but `params` changes the result.

        >>> settings = gshard.preparation_params(["vocabulary.size = 300"])
        >>> options = gshard.PrepareOptions(settings, workers=1, on_bad_row="skip")

    Attributes:
      params: Params of the `Preparation`; None: the defaults.
      beam: options of Apache Beam's pipelines, such as "--runner=FlinkRunner", which then do the
        work; None: processes of this machine do it.
    """

    params: Params | None = None
    workers: int = option(0, "Number of processes; 0: one for each core.", minimum=0)
    on_bad_row: str = option(
        "refuse",
        "What to do with damaged files and bad rows: refuse or skip.",
        choices=readers.ON_BAD_ROW,
    )
    on_copies: str = option(
        "count",
        "What to do if rows of dev or test that are given stand in another split: count or refuse.",
        choices=ON_COPIES,
    )
    work: str | None = option(
        None, "Local directory of unfinished work; by default, .work in the output."
    )
    beam: tuple[str, ...] | None = None


def prepare(
    output: str | os.PathLike,
    sources: Sequence[Source | str],
    options: PrepareOptions | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Prepares the rows of raw files for training: cleans, divides, tokenizes and shards them.

    A run that was killed goes on where it was. The files depend on the sources and `options.params`
    alone. A directory that has been prepared from the same sources and settings is left as it is.

        >>> manifest = gshard.prepare("prepared", ["pairs.tsv"], options)
        >>> manifest.rows("train") > manifest.rows("dev")
        True

    Args:
      output: directory to write, local or in a bucket (gs://, s3://).
      sources: what to read; text is parsed as in `Source.parse`.

    Raises:
      UserError: a file is missing or, with on_bad_row="refuse", damaged or bad; a setting is
        wrong; the directory holds data or work of other settings.
    """
    options = options or PrepareOptions()
    parsed = tuple(Source.parse(one) if isinstance(one, str) else one for one in sources)
    if not parsed:
        raise UserError("`source` is missing: name at least one file to prepare")
    kinds = sorted(
        {TABLE.kinds[s.content][s.has_ids]: s.path for s in parsed}.items(), reverse=True
    )
    if len(kinds) > 1:
        (one, path), (other, second) = kinds[:2]
        raise UserError(
            f"`source={path}` is {one} and `source={second}` {other}; prepare them one by one"
        )
    params = preparation.Preparation(options.params or preparation.Preparation.params()).p
    if is_bucket(output) and not options.work:
        raise UserError(
            f"`output={output}` is in a bucket: `work` must name a local directory for unfinished "
            "work"
        )
    job = Job(
        params=params,
        sources=parsed,
        output=os.fspath(output),
        work=WorkDirectory(options.work or pathlib.Path(output) / WORK),
        on_bad_row=options.on_bad_row,
    )
    if job.sources[0].has_ids and not job.params.vocabulary.files:
        raise UserError(
            f"`source={parsed[0].path}` has token ids: `vocabulary.files` must name their "
            "vocabulary, such as a tokenizer.json"
        )
    # A missing file leaves no trace of the attempt.
    files, notes = parts.find_files(parsed)
    with job.work.claimed(), _pool(job, options) as pool:
        return _Run(job, pool, progress, options.on_copies == "refuse").run(files, notes)


def _pool(job: Job, options: PrepareOptions) -> Pool | BeamPool:
    if options.beam is not None:
        return BeamPool(job, options.beam)
    return Pool(job, options.workers or os.cpu_count() or 1)


class _Run:
    """One run of a preparation."""

    def __init__(self, job: Job, pool: Pool | BeamPool, progress: Progress, refuses_copies: bool):
        self._job, self._pool, self._progress = job, pool, progress
        self._refuses_copies = refuses_copies
        self._tally = Tally()
        self._inspector = Inspector(job, self._tally)

    def run(self, files: Sequence[parts.Files], file_notes: list[str]) -> Manifest:
        """Does what is left to do."""
        settings = preparation.to_settings(self._job.params, self._job.sources)
        surveys = self._survey(files)
        if objects.exists(f"{self._job.output}/{manifests.FILE}"):
            return self._finished(settings, surveys)
        self._job.work.check_settings(settings | _digests(surveys))
        equal = self._inspector.without_unequal(files, surveys)
        part_list = list(parts.parts_of(equal, surveys, self._job.sources))
        buckets = self._unique(part_list, self._read(part_list, surveys))
        self._inspector.check_languages(buckets)
        groups = [bucket.groups for bucket in buckets]
        train = [[group for group in each if group.split == "train"] for each in groups]
        self._find_near_copies(train)
        self._find_leaks(groups, train)
        paths = [part.spans[0].path for part in part_list]
        copies = self._count_copies(groups, train, paths)
        vocabulary = self._vocabulary(train)
        tokens = self._tokens(groups, vocabulary.id_bytes, paths)
        written = self._shards(tokens, vocabulary.id_bytes)
        manifest = describe(self._job, self._tally, settings, files, surveys, written, vocabulary)
        manifest = msgspec.structs.replace(manifest, file_notes=file_notes, copies=copies)
        manifests.write(manifest, self._job.local_output)
        self._job.deliver(manifests.FILE)
        self._job.work.remove()
        return manifest

    def _finished(self, settings: dict[str, Any], surveys: dict[str, Survey]) -> Manifest:
        """Returns the manifest that is there; ValueError if it is of other settings or sources."""
        if store := stores.store_of(self._job.output):
            objects.make_folder(self._job.local_output)
            path = f"{self._job.local_output}/{manifests.FILE}"
            store.download(f"{self._job.output}/{manifests.FILE}", path)
        found = manifests.read(self._job.local_output)
        digests = {
            f"file {file.path}": file.sha256 for source in found.sources for file in source.files
        }
        self._job.work.remove()
        check_same(settings | _digests(surveys), found.settings | digests, self._job.output)
        if self._refuses_copies:
            self._inspector.refuse_copies(found.copies)
        return found

    def _do(self, stage: str, unit: str, tasks: Sequence[Task], kind: type = Done) -> list[Any]:
        """Returns the records of tasks, in their order. Tasks that are done do not run again."""
        records = {task.name: self._job.work.record(task.name, kind) for task in tasks}
        left = [task for task in tasks if records[task.name] is None]
        if not left:
            return [records[task.name] for task in tasks]
        self._progress.begin(stage, unit)
        total = max(1, sum(task.rows for task in left))
        done = [0, 0.0]

        def report(rows: int, work: float) -> None:
            done[0] += rows
            done[1] += work
            self._progress.update(done[0], min(1.0, done[1] / total))

        for task, record in self._pool.run(left, kind, report):
            # As it will be read if the run is killed: a whole number may become a float there.
            records[task.name] = msgspec.json.decode(msgspec.json.encode(record), type=kind)
        return [records[task.name] for task in tasks]

    def _survey(self, files: Sequence[parts.Files]) -> dict[str, Survey]:
        paths = dict.fromkeys((path, entry.source) for entry in files for path in entry.paths)
        tasks = [
            Task(
                parts.survey_name(path),
                objects.size_of(path) or 0,
                parts.survey_file,
                (path, self._job.sources[source]),
            )
            for path, source in paths
        ]
        found = self._do("Surveying the files", "bytes", tasks, Survey)
        return {survey.path: survey for survey in found}

    def _read(
        self, part_list: Sequence[Part], surveys: dict[str, Survey]
    ) -> list[read_rows.PartRecord]:
        self._inspector.check_before_reading(surveys)
        tasks = [
            Task(f"{read_rows.STAGE}/{part.number:06d}", part.bytes, read_rows.read_part, (part,))
            for part in part_list
        ]
        records = self._do("Reading and cleaning", "rows", tasks, read_rows.PartRecord)
        records = self._inspector.without_changed(part_list, records, surveys)
        for record in records:
            self._tally.add(record.tally)
        self._inspector.check_sources(part_list, records)
        return records

    def _unique(
        self, part_list: Sequence[Part], records: Sequence[read_rows.PartRecord]
    ) -> list[duplicates.BucketRecord]:
        files = [(part, record.chunks) for part, record in zip(part_list, records, strict=True)]
        sizes = np.zeros(row_files.RANGES, np.int64)
        for record in records:
            sizes += record.range_bytes
        total_rows = sum(record.rows for record in records)
        tasks = []
        for number, ranges in enumerate(_ranges(sizes, self._job.params.bucket_bytes)):
            rows = int(total_rows * sizes[slice(*ranges)].sum() / max(1, sizes.sum()))
            name = f"{row_files.UNIQUE_STAGE}/{number:06d}"
            tasks.append(Task(name, rows, duplicates.remove_duplicates, (number, ranges, files)))
        found = self._do("Removing duplicates", "rows", tasks, duplicates.BucketRecord)
        self._job.work.remove_files(read_rows.STAGE)
        for record in found:
            self._tally.add(record.tally)
        return found

    def _find_near_copies(self, train: Groups) -> None:
        if self._job.cleaner.near_duplicates.is_on:
            for tasks in duplicates.near_copies_tasks(self._job, train):
                self._do("Looking for near duplicates", "rows", tasks)

    def _search(
        self, words: str, stage: str, hashes_of: Any, held_out: Groups, train: Groups
    ) -> None:
        """Looks for hashes of rows held out in training; see `duplicates.search_tasks`."""
        *steps, merge = duplicates.search_tasks(stage, hashes_of, held_out, train)
        for tasks in steps:
            self._do(words, "rows", tasks)
        self._do(words, "", merge)

    def _find_leaks(self, groups: Groups, train: Groups) -> None:
        held_out = [list(filter(duplicates.can_leak, of_bucket)) for of_bucket in groups]
        if any(held_out):
            stage = duplicates.LEAK_STAGE
            self._search("Looking for leaks", stage, leaks.hashes_of, held_out, train)

    def _count_copies(
        self, groups: Groups, train: Groups, paths: Sequence[str]
    ) -> list[manifests.SplitCopies]:
        """Counts rows of given splits that another split has; UserError if they are refused."""
        given = [list(filter(split_copies.is_given, of_bucket)) for of_bucket in groups]
        if not any(given):
            return []
        words, stage = "Comparing the splits", split_copies.STAGE
        self._search(words, stage, split_copies.hashes_of, given, train)
        task = Task(f"{stage}/copies", 1, split_copies.count_copies, (given, paths))
        (copies,) = self._do(words, "", [task], list[manifests.SplitCopies])
        if self._refuses_copies:
            self._inspector.refuse_copies(copies)
        return copies

    def _vocabulary(self, train: Groups) -> train_vocabulary.VocabularyRecord:
        name, kind = f"{train_vocabulary.STAGE}/vocabulary", train_vocabulary.VocabularyRecord
        task = Task(name, 1, train_vocabulary.train_vocabulary, (train,))
        (record,) = self._do("Training the vocabulary", "", [task], kind)
        return record

    def _tokens(self, groups: Groups, id_bytes: int, paths: Sequence[str]) -> list[TokensRecord]:
        rest = paths, len(groups), id_bytes
        tasks = duplicates.tasks_by_bucket(f"{shards.TOKEN_STAGE}/", shards.tokenize, groups, *rest)
        found = self._do("Tokenizing", "rows", tasks, TokensRecord)
        stages = duplicates.NEAR_STAGE, duplicates.LEAK_STAGE, split_copies.STAGE
        for stage in (row_files.UNIQUE_STAGE, *stages):
            self._job.work.remove_files(stage)
        for record in found:
            self._tally.add(record.tally)
        return found

    def _shards(self, tokens: Sequence[TokensRecord], id_bytes: int) -> list[manifests.Shard]:
        together = collections.defaultdict(list)
        for bucket, record in enumerate(tokens):
            for group in record.groups:
                together[group.split, group.language, group.source].append((bucket, group))
        tasks = [
            task
            for _, groups in sorted(together.items())
            if any(group.rows for _, group in groups)
            for task in shards.shards_of(groups, self._job.params.shard_rows, id_bytes)
        ]
        return self._do("Writing shards", "rows", tasks, manifests.Shard)


def _digests(surveys: dict[str, Survey]) -> dict[str, str]:
    return {f"file {path}": found.sha256 for path, found in surveys.items()}


def _ranges(sizes: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of the digests of each bucket, which has `most` bytes or one range."""
    buckets, begin, held = [], 0, 0
    for index, size in enumerate(np.asarray(sizes).tolist()):
        if held and held + size > most:
            buckets.append((begin, index))
            begin, held = index, 0
        held += size
    return [*buckets, (begin, len(sizes))]
