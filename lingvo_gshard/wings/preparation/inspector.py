"""Inspector: finds files, sources and languages that are bad as a whole."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.preparation import parts, split_copies
from lingvo_gshard.wings.preparation.duplicates import BucketRecord
from lingvo_gshard.wings.preparation.formats.moses import UNEQUAL
from lingvo_gshard.wings.preparation.job import Job
from lingvo_gshard.wings.preparation.part_readers import Part
from lingvo_gshard.wings.preparation.prepared.manifest import SplitCopies
from lingvo_gshard.wings.preparation.read_rows import STAGE, PartRecord
from lingvo_gshard.wings.preparation.row_files import Example, Tally
from lingvo_gshard.wings.preparation.sources import MOSES, Survey

CHANGED = "a file changed while it was read"
NO_ROWS = "a source without rows"
_SKIP = "Set `on_bad_row=skip` to"
_CHECKED = f"{STAGE}/changed"
_REASONS_SHOWN = 3


class Inspector:
    """Refuses files that are bad as a whole. With on_bad_row="skip", counts and skips them."""

    def __init__(self, job: Job, tally: Tally):
        """Prepares to inspect. The tally counts what is left out."""
        self._job, self._tally = job, tally
        self._skips = job.on_bad_row == "skip"

    def without_unequal(
        self, files: Sequence[parts.Files], surveys: dict[str, Survey]
    ) -> list[parts.Files]:
        """Returns the files without Moses pairs whose sides differ in length."""
        equal = []
        for number, entry in enumerate(files):
            is_moses = self._job.sources[entry.source].format == MOSES
            problem = parts.unequal(entry, surveys) if is_moses else ""
            if not problem:
                equal.append(entry)
                continue
            if not self._skips:
                raise UserError(f"{problem}. {_SKIP} leave out both files, counted.")
            count = max(surveys[path].lines for path in entry.paths)
            self._tally.count_read(entry.language, count)
            self._tally.leave_out(UNEQUAL, entry.language, Example(number, 0, problem), count)
        return equal

    def refuse_copies(self, found: Sequence[SplitCopies]) -> None:
        """Raises UserError if splits that are given share rows."""
        shared = [one for one in found if one.folded]
        if shared:
            raise UserError(
                f"{'. '.join(split_copies.problems(shared))}. `on_copies=count` prepares them all "
                "the same"
            )

    def check_before_reading(self, surveys: dict[str, Survey]) -> None:
        """Raises ValueError if a file has changed since an earlier run, which read a part of it."""
        if not self._skips and self._checked() is None:
            self._refuse_changed(surveys)

    def without_changed(
        self, part_list: Sequence[Part], records: Sequence[PartRecord], surveys: dict[str, Survey]
    ) -> list[PartRecord]:
        """Returns the records of parts, with no rows of files that changed while they were read."""
        checked = self._checked()
        if checked is None:
            if not self._skips:
                self._refuse_changed(surveys)
            checked = [path for path, survey in surveys.items() if survey.has_changed()]
            self._job.work.finish(_CHECKED, checked)
        bad = set(checked)
        return [
            _without_rows(part, record) if bad & {span.path for span in part.spans} else record
            for part, record in zip(part_list, records, strict=True)
        ]

    def check_sources(self, part_list: Sequence[Part], records: Sequence[PartRecord]) -> None:
        """Raises ValueError if a source has no rows."""
        rows = collections.Counter()
        for part, record in zip(part_list, records, strict=True):
            rows[part.source] += sum(record.tally.read.values())
        for number, source in enumerate(self._job.sources):
            if rows[number]:
                continue
            if not self._skips:
                raise UserError(
                    f"`source={source.path}` has no rows: its files are empty. {_SKIP} go on "
                    "without it."
                )
            self._tally.leave_out(NO_ROWS, "", Example(number, 0, source.path), 0)

    def check_languages(self, buckets: Sequence[BucketRecord]) -> None:
        """Raises ValueError if cleaning left no row of a language, or no training row at all."""
        groups = [group for bucket in buckets for group in bucket.groups]
        if not any(group.split == "train" for group in groups):
            read = sum(self._tally.read.values())
            raise UserError(f"No training row is left of {read:,}: {self._reasons()}")
        gone = sorted(self._tally.read.keys() - {group.language for group in groups} - {""})
        if gone and not self._skips:
            language = gone[0]
            more = f", and {len(gone) - 1} more such languages" if len(gone) > 1 else ""
            raise UserError(
                f"No row of the language {language} is left of "
                f"{self._tally.read[language]:,}{more}: {self._reasons(language)}. {_SKIP} go on "
                "without."
            )

    def _checked(self) -> list[str] | None:
        """Returns the files that changed while they were read; None before all were read."""
        return self._job.work.record(_CHECKED, list[str])

    def _refuse_changed(self, surveys: dict[str, Survey]) -> None:
        for path, survey in surveys.items():
            if survey.has_changed():
                raise UserError(
                    f"{path}: {CHANGED}. Remove {self._job.work.root} and start again once it no "
                    f"longer changes. {_SKIP} leave out the file, counted."
                )

    def _reasons(self, language: str | None = None) -> str:
        """Returns the main reasons that rows were left out for, with an example of each."""
        counts = {
            reason: sum(n for code, n in found.items() if language in (None, code))
            for reason, found in self._tally.rejected.items()
        }
        main = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_REASONS_SHOWN]
        examples = self._tally.examples
        return "; ".join(
            f"{count:,} dropped: {reason} ({examples[reason][0].text})"
            for reason, count in main
            if count
        )


def _without_rows(part: Part, record: PartRecord) -> PartRecord:
    """Returns the record of a part of a file that changed, with all rows counted as left out."""
    tally = Tally(read=record.tally.read)
    for language, count in record.tally.read.items():
        tally.reject(CHANGED, language, count)
    tally.show(CHANGED, Example(part.number, 0, part.spans[0].path))
    return PartRecord(tally, 0, 0, [0] * len(record.range_bytes))
