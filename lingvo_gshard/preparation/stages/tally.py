"""Tally: counts what became of rows, and keeps examples of those left out."""

from __future__ import annotations

import msgspec

from lingvo_gshard.data.sources.report import excerpt

_EXAMPLES = 3


class Example(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A row that was left out.

    Attributes:
      part: number of the part it is in.
      line: its line, or another number that orders the rows of a part.
      text: where it is and what is wrong with it.
    """

    part: int
    line: int
    text: str

    @classmethod
    def of_row(cls, part: int, file: str, line: int, text: str) -> Example:
        """Returns the example of a row: where it is, and the beginning of its text.

        Args:
          part: number of the part it is in.
          file: the raw file.
          line: its line.
          text: one of its texts.
        """
        return cls(part, line, f"{file}:{line}: {excerpt(text)}")


class Tally(msgspec.Struct):
    """Counts of rows. Tallies of parts are added up in any order, with the same result.

    Attributes:
      read: language -> number of rows read.
      rejected: reason -> language -> number of rows left out; "" if the language is not known.
      examples: reason -> the first rows left out for it, in the order of the sources.
      rewritten: kind of change -> number of texts changed.
    """

    read: dict[str, int] = {}
    rejected: dict[str, dict[str, int]] = {}
    examples: dict[str, list[Example]] = {}
    rewritten: dict[str, int] = {}

    def count_read(self, language: str, count: int = 1) -> None:
        """Counts rows that were read."""
        self.read[language] = self.read.get(language, 0) + count

    def reject(self, reason: str, language: str, count: int = 1) -> None:
        """Counts rows that are left out."""
        languages = self.rejected.setdefault(reason, {})
        languages[language] = languages.get(language, 0) + count

    def leave_out(self, reason: str, language: str, example: Example, count: int = 1) -> None:
        """Counts rows that are left out, and keeps the example if it is among the first."""
        self.reject(reason, language, count)
        self.show(reason, example)

    def show(self, reason: str, example: Example) -> None:
        """Keeps an example if it is among the first."""
        kept = self.examples.setdefault(reason, [])
        if len(kept) < _EXAMPLES or example < kept[-1]:
            self.examples[reason] = sorted({*kept, example})[:_EXAMPLES]

    def rewrite(self, kind: str, count: int) -> None:
        """Counts texts that were changed."""
        self.rewritten[kind] = self.rewritten.get(kind, 0) + count

    def add(self, other: Tally) -> None:
        """Adds the counts of other rows."""
        for language, count in other.read.items():
            self.count_read(language, count)
        for reason, languages in other.rejected.items():
            for language, count in languages.items():
                self.reject(reason, language, count)
        for reason, examples in other.examples.items():
            for example in examples:
                self.show(reason, example)
        for kind, count in other.rewritten.items():
            self.rewrite(kind, count)

    @property
    def rejected_rows(self) -> dict[str, int]:
        """Reason -> number of rows left out."""
        return {reason: sum(counts.values()) for reason, counts in self.rejected.items()}
