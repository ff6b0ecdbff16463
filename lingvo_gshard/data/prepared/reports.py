"""Reports on prepared data for users: cleaning, epochs and repeats."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

from lingvo_gshard.data.prepared.manifest import NO_LANGUAGE, Manifest
from lingvo_gshard.data.prepared.planning.mixture import Use
from lingvo_gshard.data.sources.report import CleaningReport

# Languages that are named one by one.
_MOST_NAMED = 8


def cleaning_report(manifest: Manifest, directory: str | os.PathLike) -> CleaningReport:
    """Returns how many rows preparation kept, dropped and rewrote, over all splits.

    Args:
      manifest: the manifest.
      directory: where it is, for the first line of the report.
    """
    counts = manifest.languages
    report = CleaningReport(
        split=os.fspath(directory),
        read=sum(language.read for language in counts.values()),
        kept=sum(sum(language.kept.values()) for language in counts.values()),
        dropped=collections.Counter({r.reason: r.rows for r in manifest.rejections}),
        rewritten=collections.Counter(manifest.rewritten),
        examples={r.reason: r.examples[0] for r in manifest.rejections if r.examples},
    )
    for name, language in counts.items():
        code = "" if name == NO_LANGUAGE else name
        report.kept_by_language[code] = sum(language.kept.values())
        for reason, rows in language.rejected.items():
            report.dropped_by_language[code, reason] = rows
    return report


def usage_notes(uses: Sequence[Use]) -> list[str]:
    """Returns lines about how often languages were read.

    Args:
      uses: one for each language.
    """
    if not uses:
        return []
    read, rows = sum(use.read for use in uses), sum(use.rows for use in uses)
    lines = [f"rows read: {read:,} of {rows:,}, {read / rows:.2f} epochs"]
    by_epochs = sorted(uses, key=lambda use: -use.epochs)
    if len(uses) > 1:
        lines.append("epochs by language: " + _named(by_epochs))
    if repeated := [use for use in uses if use.read > use.rows]:
        repeats = sum(use.read - use.rows for use in repeated)
        lines.append(f"{len(repeated)} languages were repeated, {repeats:,} rows in all")
    return lines


def _named(uses: list[Use]) -> str:
    """Returns the epochs of the most and of the least repeated languages."""
    half = _MOST_NAMED // 2
    names = [f"{use.language} {use.epochs:.2f}" for use in uses]
    if len(names) > _MOST_NAMED:
        names = [*names[:half], "...", *names[-half:]]
    return ", ".join(names)
