"""Describes prepared data: makes the manifest of what the stages have found and written."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.data.prepared import manifest
from lingvo_gshard.preparation.inputs import parts
from lingvo_gshard.preparation.inputs.survey import Survey
from lingvo_gshard.preparation.job import Job
from lingvo_gshard.preparation.stages.tally import Tally
from lingvo_gshard.preparation.stages.train_vocabulary import VocabularyRecord


def describe(
    job: Job,
    tally: Tally,
    settings: dict[str, Any],
    files: Sequence[parts.Files],
    surveys: dict[str, Survey],
    shards: Sequence[manifest.Shard],
    vocabulary: VocabularyRecord,
) -> manifest.Manifest:
    """Returns the manifest.

    Args:
      job: the job.
      tally: what became of the rows.
      settings: all settings by name.
      files: the files of all sources.
      surveys: path -> survey.
      shards: the shards, in the order of their files.
      vocabulary: the vocabularies.
    """
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
