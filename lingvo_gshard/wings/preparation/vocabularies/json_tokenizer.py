"""JsonTokenizer: a tokenizer.json as the tokenizer of a published model."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lingvo_gshard.core import explained

if TYPE_CHECKING:
    import tokenizers

_SAMPLE = "a"
# The tokens that name a language: __de__ in M2M-100, deu_Latn in NLLB, >>deu<< in Marian, de_DE in
# mBART-50.
LANGUAGE = re.compile(r"__(\w+)__|([a-z]{3}_[A-Z][a-z]{3})|>>(\w+)<<|([a-z]{2}_[A-Z]{2})")
# The piece of a byte in vocabularies of characters.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class JsonTokenizer:
    """A tokenizer of the tokenizers package.

    The file itself says which ids stand before a text. transformers 5 drops `add_bos_token` and
    `add_eos_token` of tokenizer_config.json where there is a tokenizer.json.
    """

    def __init__(self, content: str | bytes, otherwise: str):
        """Reads the text of a tokenizer.json. Raises UserError with `otherwise` if it is none."""
        # Imported here: most runs need no tokenizers.
        import tokenizers

        # The package raises plain Exceptions.
        with explained(otherwise, Exception):
            text = content if isinstance(content, str) else content.decode("utf-8")
            self.found: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
        self.found.no_padding()
        self.found.no_truncation()
        self.size = self.found.get_vocab_size(with_added_tokens=True)
        # Tokens that stand for a byte where no piece fits. Byte-level vocabularies have none: they
        # decode every character as soon as it is complete.
        pieces = self.found.get_vocab(with_added_tokens=False)
        self.bytes = frozenset(index for piece, index in pieces.items() if _BYTE.fullmatch(piece))

    @functools.cached_property
    def before(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a text."""
        plain = self.encode(_SAMPLE)
        whole = self.found.encode(_SAMPLE, add_special_tokens=True).ids
        starts = range(len(whole) - len(plain) + 1)
        return tuple(whole[: next(i for i in starts if whole[i : i + len(plain)] == plain)])

    @functools.cached_property
    def languages(self) -> Mapping[str, int]:
        """Code of a language -> id."""
        added = self.found.get_added_tokens_decoder()
        return languages_in({token.content: index for index, token in added.items()})

    def encode(self, text: str) -> list[int]:
        return self.found.encode(text, add_special_tokens=False).ids

    def places(self, text: str) -> list[tuple[int, int]]:
        return self.found.encode(text, add_special_tokens=False).offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self.found.decode(list(ids), skip_special_tokens=True)

    def piece(self, index: int) -> str:
        # Decoders drop the space at the start of a text.
        token = self.found.id_to_token(index) or ""
        if token.startswith("▁"):
            return token
        return self.found.decode([index], skip_special_tokens=False).replace(" ", "▁")


def languages_in(ids: Mapping[str, int]) -> dict[str, int]:
    """Returns code of a language -> id, from token -> id."""
    found = ((LANGUAGE.fullmatch(token), index) for token, index in ids.items())
    return {next(filter(None, match.groups())): index for match, index in found if match}
