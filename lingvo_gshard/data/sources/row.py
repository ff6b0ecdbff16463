"""Row: a sentence with its translation, or a text, and where it was read."""

import collections
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A sentence with its translation, or a text without a source.

    Attributes:
      language: code of the source's language, such as "de".
      source: the sentence; "" for a text that is no translation.
      target: the translation, or the text.
      line: number of its line in the file, counted from 1.
    """

    language: str
    source: str
    target: str
    file: str = ""
    line: int = 0


def rows_by_language(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns language -> its rows, in order. Languages are in the order of their first rows."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.language].append(row)
    return dict(found)
