"""One pair of sentences, or one text, and where it was read."""

from typing import NamedTuple


class Row(NamedTuple):
    """A sentence of `language` beside its translation; `file` and `line` say where it stood.

    A text that is no translation is a row, too: a target without a source.
    """

    language: str
    source: str
    target: str
    file: str = ""
    line: int = 0
