"""Kinds of tokens for whoever counts tokens by kind: languages, and classes of pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Ends the name of the array with the kinds of one side of a batch: source_kinds, target_kinds.
KINDS = "_kinds"


class TokenKinds(NamedTuple):
    """The kinds of the tokens of a batch.

    Attributes:
      arrays: name such as `source_kinds` -> int32 [B,L], language * len(classes) + class.
      languages: names of the languages; empty if they are not known.
    """

    arrays: Mapping[str, Any]
    languages: tuple[str, ...]
    classes: tuple[str, ...]
