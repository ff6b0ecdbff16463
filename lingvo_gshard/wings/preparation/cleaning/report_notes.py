"""Says what the counts of a CleaningReport mean: about languages, and about limits of length."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from lingvo_gshard.data import LIMITS, REPORT_NOTES, CleaningReport, Limit

_SHARES = (0.99, 0.999, 1.0)
# Batches and buffers of these lengths suit all kinds of devices.
_MULTIPLE = 8
_COUNTERS = ("dropped", "rewritten", "kept_by_language", "dropped_by_language")


@REPORT_NOTES.register("languages")
def about_languages(report: CleaningReport) -> list[str]:
    """Returns a line with the rows kept of each language, and one for each that lost most."""
    kept = report.kept_by_language
    dropped: dict[str, dict[str, int]] = {language: {} for language, _ in kept.most_common()}
    by_language = sorted(report.dropped_by_language.items(), key=lambda item: item[0][0])
    for (language, reason), count in by_language:
        dropped.setdefault(language, {})[reason] = count
    losses = [
        loss_note(language or "the text", reasons, sum(reasons.values()) + kept[language])
        for language, reasons in dropped.items()
        if language or not kept[language]
    ]
    return [*language_notes(kept), *filter(None, losses)]


@REPORT_NOTES.register(LIMITS)
def about_limits(report: CleaningReport) -> list[str]:
    """Returns a line about each limit that rows exceed."""
    return [advice_of(limit) for limit in report.limits if limit.exceeded]


def advice_of(limit: Limit) -> str:
    """Returns how long rows are, and the value of the setting that keeps more of them."""
    half, most, nearly_all = (_within(limit, share) for share in (0.5, 0.9, 0.99))
    exceeded, longest = limit.exceeded, max(limit.lengths)
    rows = "1 row has" if exceeded == 1 else f"{exceeded:,} rows have"
    return (
        f"{rows} more {limit.unit} than {limit.setting} = {limit.value:,}. Of "
        f"{limit.lengths.total():,} rows, half have at most {half:,}, 90% at most {most:,}, "
        f"99% at most {nearly_all:,}; the longest has {longest:,}. {_remedy(limit)}"
    )


def _remedy(limit: Limit) -> str:
    kept = 1 - limit.exceeded / limit.lengths.total()
    share = next(share for share in _SHARES if share > kept)
    value = -(-_within(limit, share) // _MULTIPLE) * _MULTIPLE
    kept_then = "all" if value >= max(limit.lengths) else f"{100 * share:g}% of them"
    return f"{limit.setting} = {value} keeps {kept_then}."


def _within(limit: Limit, share: float) -> int:
    """Returns the least length that at least this share of rows does not exceed."""
    rank, seen = math.ceil(share * (limit.lengths.total() - 1)), 0
    for length in sorted(limit.lengths):
        seen += limit.lengths[length]
        if seen > rank:
            break
    return length


def merge(report: CleaningReport, other: CleaningReport) -> None:
    """Adds the counts of another part of the same split to a report.

    An example that is already there stays. The examples therefore depend on the order of merging;
    the counts do not.
    """
    report.read += other.read
    report.kept += other.kept
    for name in _COUNTERS:
        getattr(report, name).update(getattr(other, name))
    report.examples = other.examples | report.examples
    merged = {limit.setting: limit for limit in report.limits}
    for limit in other.limits:
        before = merged.get(limit.setting)
        lengths = limit.lengths + before.lengths if before else limit.lengths
        merged[limit.setting] = dataclasses.replace(limit, lengths=lengths)
    report.limits = list(merged.values())


def language_notes(kept: collections.Counter[str]) -> list[str]:
    """Returns a line with the rows kept of each language ("" if unknown), if there are several."""
    named = [(language, rows) for language, rows in kept.most_common() if language]
    if len(named) < 2:
        return []
    text = ", ".join(f"{language} {rows:,}" for language, rows in named)
    return [f"{len(named)} languages: {text}"]


def loss_note(language: str, dropped: Mapping[str, int], rows: int) -> str:
    """Returns a warning if more than half of a language's rows were dropped, else "".

    `dropped` has the number of rows by reason, `rows` counts all rows, dropped ones included.
    """
    lost = sum(dropped.values())
    if 2 * lost <= rows:
        return ""
    reason, most = max(dropped.items(), key=lambda item: item[1])
    return f"Warning: {language} lost {lost:,} of {rows:,} rows, {most:,} because of: {reason}"
