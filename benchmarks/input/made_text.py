"""Writes made sentence pairs, as many as wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

LANGUAGES = 50
_WORDS = 20_000
_ROWS_AT_A_TIME = 1 << 15
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
# One row in `_COPY_EVERY` is a copy of another row. One in `_EMPTY_EVERY` is empty on one side.
_COPY_EVERY, _EMPTY_EVERY = 20, 1000


def write_tsv(path: str | os.PathLike, rows: int) -> None:
    """Writes a TSV file of sentence pairs.

    Words and languages are as frequent as in Zipf's law, with lengths of 4 to 16 words. A
    twentieth of the rows are duplicates, and a thousandth have an empty side.
    """
    with open(path, "w", encoding="utf-8") as file:
        for lines in _lines(rows):
            file.writelines(lines)


def _lines(rows: int) -> Iterator[list[str]]:
    draw = np.random.default_rng(0)
    words = _words(draw)
    # ISO 639-2 keeps these codes for local use, so no script is known for them.
    codes = [f"q{a}{b}" for a in "abcde" for b in "abcdefghij"]
    assert len(codes) == LANGUAGES
    share = 1 / np.arange(1, LANGUAGES + 1)
    for begin in range(0, rows, _ROWS_AT_A_TIME):
        count = min(_ROWS_AT_A_TIME, rows - begin)
        lengths = draw.integers(4, 17, count)
        ends = np.cumsum(lengths).tolist()
        # Zipf's law by an inverse of its cumulative distribution.
        ranks = (_WORDS ** draw.random((2, ends[-1])) - 1).astype(np.int64).tolist()
        languages = draw.choice(LANGUAGES, count, p=share / share.sum()).tolist()
        lines, start = [], 0
        for row, (end, language) in enumerate(zip(ends, languages, strict=True)):
            source = " ".join([words[i] for i in ranks[0][start:end]])
            target = " ".join([words[i] for i in ranks[1][start:end]])
            start = end
            if row % _EMPTY_EVERY == 1:
                source = ""
            lines.append(f"{codes[language]}\t{source}\t{target}\n")
        for row in range(_COPY_EVERY, count, _COPY_EVERY):
            lines[row] = lines[row - _COPY_EVERY // 2]
        yield lines


def _words(draw: np.random.Generator) -> list[str]:
    lengths = draw.integers(1, 5, _WORDS).tolist()
    return ["".join(draw.choice(_SYLLABLES, length)) for length in lengths]
