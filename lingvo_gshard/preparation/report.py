"""Says what a preparation did to the rows: counts, reasons with examples, languages."""

from __future__ import annotations

import collections

from lingvo_gshard.data.prepared.manifest import Manifest
from lingvo_gshard.data.sources.report import language_notes, loss_note
from lingvo_gshard.data.vocabularies import coverage


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
        f"{one.reason}, for example {example}"
        for one in manifest.rejections
        for example in one.examples[:1]
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
    for vocabulary in manifest.vocabularies:
        lines.append(f"The {vocabulary.side} vocabulary has {vocabulary.size:,} ids.")
        lines += filter(None, [coverage.to_note(vocabulary.coverage)])
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    tokens = sum(shard.source_tokens + shard.target_tokens for shard in shards)
    lines.append(f"{tokens:,} tokens in {len(shards):,} shards")
    return lines
