"""One pair of sentences, and where it was read."""

from typing import NamedTuple


class Row(NamedTuple):
    """A sentence of `language` beside its translation; `file` and `line` say where it stood."""

    language: str
    source: str
    target: str
    file: str = ""
    line: int = 0
