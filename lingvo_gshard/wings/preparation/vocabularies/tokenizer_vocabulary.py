"""TokenizerVocabulary: the base of vocabularies of other tokenizers than SentencePiece's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lingvo_gshard.data import Vocabulary, encoding


class Tokenizer(Protocol):
    """The interface of tokenizers that a vocabulary needs.

    Attributes:
      before: ids that the tokenizer puts before a text.
      bytes: ids of single bytes, whose text depends on all bytes beside them.
      languages: code of a language -> the id of the token that names it.
    """

    before: tuple[int, ...]
    size: int
    bytes: frozenset[int]

    @property
    def languages(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...

    def places(self, text: str) -> list[tuple[int, int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, index: int) -> str: ...


class TokenizerVocabulary(Vocabulary):
    """Base of vocabularies that a tokenizer of another kind has. They draw no segmentations."""

    can_sample = False
    _tokenizer: Tokenizer

    @property
    def size(self) -> int:
        """The number of ids, including added tokens."""
        return self._tokenizer.size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without ids that begin or end a text."""
        with encoding([text]):
            return self._tokenizer.encode(text)

    def places(self, text: str) -> list[tuple[int, int]]:
        with encoding([text]):
            return self._tokenizer.places(text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        del num_threads
        return [self.encode(text) for text in texts]

    def is_byte(self, index: int) -> bool:
        return index in self._tokenizer.bytes

    def piece(self, index: int) -> str:
        return self._tokenizer.piece(int(index)) if index < self.size else ""

    def _decode_kept(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)
