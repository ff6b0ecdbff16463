"""Rows of token ids. Their texts are the ids in decimal, so that each stage takes an id for a word.

Splits, duplicates and leaks of texts are found in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.data import Row, Vocabulary

UNKNOWN = "an id is not in the vocabulary"


def to_text(ids: object) -> str | None:
    """Returns the text of a row of ids; None of what is no list of integers."""
    # A bool is an int of Python, and no id.
    if isinstance(ids, list) and all(type(each) is int for each in ids):
        return " ".join(map(str, ids))
    return None


def of_texts(texts: Sequence[str], begin: Sequence[int], end: int) -> list[list[int]]:
    """Returns the ids of rows without those that begin and end a text, which all rows get."""
    rows = [list(map(int, text.split())) for text in texts]
    first = len(begin)
    rows = [ids[first:] if first and ids[:first] == list(begin) else ids for ids in rows]
    return [ids[:-1] if ids[-1:] == [end] else ids for ids in rows]


def problem_of(row: Row, vocabularies: Sequence[Vocabulary]) -> str:
    """Returns which id is not in the vocabulary of its side; "" for none, or no vocabularies."""
    for text, vocabulary in zip((row.source, row.target), vocabularies, strict=False):
        ids = np.fromstring(text, np.int64, sep=" ")
        outside = ids[(ids < 0) | (ids >= vocabulary.size)]
        if len(outside):
            return f"{outside[0]:,}; vocabulary.files has the ids 0 to {vocabulary.size - 1:,}"
    return ""
