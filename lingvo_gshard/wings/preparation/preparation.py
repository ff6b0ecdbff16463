"""Describes prepared data: makes the manifest of what the stages have found and written."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import Configurable, Params
from lingvo_gshard.wings.preparation import parts, split_copies
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.leaks import DocumentCleaner
from lingvo_gshard.wings.preparation.cleaning.report_notes import language_notes, loss_note
from lingvo_gshard.wings.preparation.job import Job
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.manifest import TEXT, Manifest, sha256_of
from lingvo_gshard.wings.preparation.row_files import Tally
from lingvo_gshard.wings.preparation.sources import Source, Survey
from lingvo_gshard.wings.preparation.train_vocabulary import VocabularyRecord
from lingvo_gshard.wings.preparation.vocabularies import others, vocabulary_trainer
from lingvo_gshard.wings.preparation.vocabularies.vocabulary_trainer import VocabularyTrainer


def counts(manifest: Manifest) -> list[tuple[str, int]]:
    """Returns (description, number) of each line of a table of the counts."""
    read = sum(counts.read for counts in manifest.languages.values())
    lines = [("read", read)]
    lines += [(f"dropped: {one.reason}", one.rows) for one in manifest.rejections]
    lines += [(f"kept: {split}", manifest.rows(split)) for split in sorted(manifest.splits)]
    return lines + sorted(manifest.rewritten.items())


def notes(manifest: Manifest) -> list[str]:
    """Returns lines about reasons, languages and files, to be printed below the table."""
    lines = [
        *manifest.file_notes,
        *(
            f"{one.reason}, for example {example}"
            for one in manifest.rejections
            for example in one.examples[:1]
        ),
        *split_copies.problems(manifest.copies),
    ]
    # Languages without any row left are not listed.
    kept = +collections.Counter(
        {language: sum(counts.kept.values()) for language, counts in manifest.languages.items()}
    )
    lines += language_notes(kept)
    lines += [
        note
        for language, counts in sorted(manifest.languages.items())
        if language and (note := loss_note(language, counts.rejected, counts.read))
    ]
    for each in manifest.vocabularies:
        lines.append(f"The {each.side} vocabulary has {each.size:,} ids.")
        lines += filter(None, [vocabulary_trainer.to_note(each.coverage)])
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    tokens = sum(shard.source_tokens + shard.target_tokens for shard in shards)
    lines.append(f"tokens: {tokens:,}, shards: {len(shards):,}")
    if manifest.content == TEXT and sum(shard.rows for shard in shards) == 1:
        lines.append("A text without empty lines is one row; document=line makes each line a row.")
    return lines


def describe(
    job: Job,
    tally: Tally,
    settings: dict[str, Any],
    files: Sequence[parts.Files],
    surveys: dict[str, Survey],
    shards: Sequence[manifest.Shard],
    vocabulary: VocabularyRecord,
) -> manifest.Manifest:
    """Returns the manifest. The shards are in the order of their files."""
    sources = collections.defaultdict(dict)
    for entry in files:
        for path in entry.paths:
            found = surveys[path]
            sources[job.sources[entry.source].name][path] = manifest.SourceFile(
                path=path, bytes=found.bytes, sha256=found.sha256
            )
    splits = collections.defaultdict(list)
    languages = collections.defaultdict(manifest.LanguageCounts)
    for language, count in tally.read.items():
        languages[language].read = count
    for reason, counts in tally.rejected.items():
        for language, count in counts.items():
            languages[language].rejected[reason] = count
    for shard in shards:
        splits[shard.split].append(shard)
        kept = languages[shard.language].kept
        kept[shard.split] = kept.get(shard.split, 0) + shard.rows
    rejected = sorted(tally.rejected_rows.items(), key=lambda item: (-item[1], item[0]))
    return manifest.Manifest(
        content=job.sources[0].content,
        id_bytes=vocabulary.id_bytes,
        sources=[
            manifest.Source(name=name, files=list(files.values()))
            for name, files in sources.items()
        ],
        settings=settings,
        splits=dict(splits),
        languages=dict(languages),
        rejections=[
            manifest.Rejection(
                reason=reason,
                rows=rows,
                examples=[example.text for example in tally.examples.get(reason, [])],
            )
            for reason, rows in rejected
        ],
        rewritten=tally.rewritten,
        vocabularies=vocabulary.files,
    )


# These change where and how fast something is done, and not what comes out.
_WITHOUT_EFFECT = ("vocabulary.cache_directory",)


class Preparation(Configurable):
    """The settings that determine prepared data, besides the sources."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("cleaning", Cleaner.params(), "Params of the cleaner of sentence pairs.")
        p.define("documents", DocumentCleaner.params(), "Params of the cleaner of text.")
        p.define("vocabulary", VocabularyTrainer.params(), "Params of the vocabularies.")
        p.define(
            "temperature",
            1.0,
            "The vocabulary is trained on languages in proportion to n ** (1 / temperature).",
            minimum=1,
        )
        p.define(
            "held_out_per_mille",
            10,
            "Thousandths of the target sentences that are held out for dev and as many for test, "
            "of sources without a split of their own.",
            minimum=0,
            below=500,
        )
        p.define("seed", 0, "Chooses the order of rows.", minimum=0)
        p.define("shard_rows", 1_000_000, "Largest number of rows of a shard.", minimum=1)
        p.define("max_line_bytes", 1 << 20, "Longer lines are bad rows.", minimum=1)
        p.define(
            "bucket_bytes",
            64 << 20,
            "Bytes of the rows that a worker holds at a time, in memory about five times as many.",
            minimum=1,
        )
        return p


def to_settings(params: Params, sources: tuple[Source, ...]) -> dict[str, Any]:
    """Returns all settings by name, as values of JSON."""
    settings: dict[str, Any] = {}
    for name, value in params.leaves():
        if name not in _WITHOUT_EFFECT:
            if isinstance(value, type):
                value = f"{value.__module__}.{value.__qualname__}"
            settings[name] = value
    for path in others.paths_of(params.vocabulary.files):
        settings[f"file {path}"] = sha256_of(path)
    for number, source in enumerate(sources):
        for field, value in vars(source).items():
            settings[f"sources[{number}].{field}"] = value
    return msgspec.json.decode(msgspec.json.encode(settings))
