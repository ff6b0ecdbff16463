"""Kinds of tokens: the language of a token's example, and a class derived from the vocabulary.

Watched routers count how many tokens of each kind they send to each expert.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import token_kinds
from lingvo_gshard.data import Group, Input, PackedBatch, PackedInput, Vocabulary, packing

START, END, TAG, BYTE = "start of text", "end of sentence", "tag", "byte"
DIGITS, PUNCTUATION, UNKNOWN = "digits", "punctuation", "unknown"
FIRST, CONTINUATION = "first piece", "continuation"
CLASSES = (FIRST, CONTINUATION, PUNCTUATION, DIGITS, BYTE, TAG, START, END, UNKNOWN)

_SPACE = "▁"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Tags of languages as published models write them, and other tokens that are no text.
_TAG = re.compile(
    r"<[^<>\s]+>|\[[A-Z]+\]|>>\w+<<|__\w+__|[a-z]{2,3}_[A-Z][a-z]{3}|[a-z]{2,3}_[A-Z]{2}"
)


@dataclasses.dataclass(frozen=True)
class Languages:
    """The languages of the rows of a table.

    Attributes:
      names: the languages; empty if none is known.
      begins: number of the first row of each group of rows, ascending.
      numbers: the number of each group's language among `names`, int32.
    """

    names: tuple[str, ...]
    begins: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group], unknown: str = "") -> Languages:
        """Returns the languages of groups in row order; `unknown` where no language is known."""
        names = sorted({group.language for group in groups})
        begins = np.array([group.begin for group in groups], np.int64)
        numbers = np.array([names.index(group.language) for group in groups], np.int32)
        return cls(() if names in ([], [unknown]) else tuple(names), begins, numbers)

    def of_tokens(self, batch: packing.Batch, segments_BL: np.ndarray) -> np.ndarray:
        """Returns int32 [B,L], the number of the language of each token; 0 where the segment is 0.

        Only the examples of a `PackedBatch` are known.
        """
        if not self.names or not isinstance(batch, PackedBatch):
            return np.zeros(segments_BL.shape, np.int32)
        rows = np.take_along_axis(batch.examples, segments_BL.astype(np.int64), axis=1)
        groups = np.searchsorted(self.begins, rows, side="right") - 1
        return self.numbers[np.maximum(groups, 0)]


def kinds_in(input_: Input, batch: packing.Batch) -> token_kinds.TokenKinds | None:
    """Returns the kinds of the tokens of a training batch; None if its input does not know them."""
    own = input_.token_kinds(batch)
    if own is not None or not isinstance(input_, PackedInput):
        return own
    groups = input_.row_groups()
    if groups is None:
        return None
    return kinds_of(batch, input_.sides, Languages.of(groups, input_.unknown_language))


def kinds_of(
    batch: packing.Batch, sides: Mapping[str, tuple[str, Vocabulary]], languages: Languages
) -> token_kinds.TokenKinds:
    """Returns the kinds of the tokens of a batch.

    Args:
      sides: "source" or "target" -> the array of ids that layers get, and their vocabulary.
      languages: the languages of the rows that the batch was made of.
    """
    arrays = {}
    names = languages.names if isinstance(batch, PackedBatch) else ()
    for side, (ids, vocabulary) in sides.items():
        classes_BL = classes_of(vocabulary)[batch[ids]]
        language_BL = languages.of_tokens(batch, batch[f"{side}_segments"])
        arrays[f"{side}{token_kinds.KINDS}"] = language_BL * np.int32(len(CLASSES)) + classes_BL
    return token_kinds.TokenKinds(arrays, names, CLASSES)


@functools.lru_cache(maxsize=2)
def classes_of(vocabulary: Vocabulary) -> np.ndarray:
    """Returns the class of each id as an index into CLASSES, int32 [V]."""
    found = [_class_of(vocabulary, index) for index in range(vocabulary.size)]
    return np.array([CLASSES.index(name) for name in found], np.int32)


def _class_of(vocabulary: Vocabulary, index: int) -> str:
    if index in vocabulary.end_ids:
        return END
    if index == vocabulary.bos_id or index in vocabulary.before:
        return START
    if index in (*vocabulary.source_start, *vocabulary.target_start):
        return TAG
    if index in (vocabulary.pad_id, vocabulary.unk_id):
        return UNKNOWN
    piece = vocabulary.piece(index)
    text = piece.removeprefix(_SPACE)
    if _BYTE.fullmatch(piece):
        return BYTE
    if _TAG.fullmatch(piece):
        return TAG
    if text.isdecimal():
        return DIGITS
    if text and all(unicodedata.category(letter)[0] in "PS" for letter in text):
        return PUNCTUATION
    return FIRST if piece.startswith(_SPACE) else CONTINUATION
