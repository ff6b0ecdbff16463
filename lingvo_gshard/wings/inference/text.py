"""Texts under way: stop strings, and text as it grows token by token.

The text of new tokens is the difference between two decoded texts: of given and new tokens, and of
the given tokens alone. A stop string ends a text: the token that completes the stop string is the
text's last token. A program may have computed more tokens; they do not belong to the text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference.options import DecodingOptions

# Stands for a character whose bytes are not all there yet.
_INCOMPLETE = "\ufffd"
# This many given tokens are decoded together with each text.
_CONTEXT = 16


def stop_check(
    vocabulary: Vocabulary, given: Sequence[int], options: DecodingOptions
) -> Callable[[Sequence[int]], bool] | None:
    """Returns what says whether the text of tokens contains a stop string; None without any."""
    if not options.stop:
        return None
    text_of = _text_after(vocabulary, given)
    return lambda tokens: any(end in text_of(tokens) for end in options.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string in it."""
    ends = [position for end in stop if (position := text.find(end)) >= 0]
    return text[: min(ends)] if ends else text


def continuation(
    vocabulary: Vocabulary, given: Sequence[int], tokens: Sequence[int], stop: Sequence[str]
) -> str:
    """Returns the text that `tokens` add to the text of `given`, up to the first stop string."""
    return cut_at_stop(_text_after(vocabulary, given)(tokens), stop)


def echo(vocabulary: Vocabulary, given: Sequence[int]) -> str:
    """Returns the text of given tokens without a last character that they leave incomplete."""
    return _complete(vocabulary.text_of(given))


class GrowingText:
    """The text of tokens that are generated one after another.

    `add` returns a piece of text only when no later token can change the piece. It holds back
    incomplete characters, and characters that may be the start of a stop string.

    Attributes:
      calls: name and arguments of each call of a function that the complete text has.
    """

    calls: Sequence[tuple[str, Any]] = ()

    def __init__(
        self,
        vocabulary: Vocabulary,
        given: Sequence[int] = (),
        stop: Sequence[str] = (),
        is_echoed: bool = False,
    ):
        """Begins a text.

        Args:
          given: ids before the text. They decide whether the text begins with a space.
          stop: strings that end the text.
          is_echoed: whether the text follows `echo` of the given tokens.
        """
        self._text_after, self._stop = _text_after(vocabulary, given, is_echoed), stop
        self._vocabulary = vocabulary
        self._first = len(echo(vocabulary, given)) if is_echoed else 0
        self._tokens: list[int] = []
        self._shown = 0

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Returns where each of the next tokens begins, in characters from the start of the text.

        The text begins with the given tokens if they are echoed. A token that goes on with a
        character begins where the character does. Call this before `add`, which makes the tokens
        part of the text.
        """
        parts = ([*self._tokens, *tokens[:n]] for n in range(len(tokens)))
        return [self._first + len(self._settled(part)) for part in parts]

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Returns the text that the next tokens add."""
        self._tokens += tokens
        text = self._text_of(self._tokens)
        cut = cut_at_stop(text, self._stop)
        if not is_last and cut == text:
            text = self._settled(self._tokens)
            kept = max((overlap(text, end) for end in self._stop), default=0)
            cut = text[: len(text) - kept]
        new, self._shown = cut[self._shown :], max(self._shown, len(cut))
        return new

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._text_after(tokens)

    def _settled(self, tokens: Sequence[int]) -> str:
        """Returns the part of the text of tokens that no later token can change."""
        text, is_byte = self._text_of(tokens), self._vocabulary.is_byte
        byte = next((i for i in reversed(range(len(tokens))) if is_byte(tokens[i])), None)
        if byte is None or self._text_of(tokens[: byte + 1]) != text:
            return _complete(text)
        # The text ends with bytes. The next byte may change the text of all these bytes.
        while byte and is_byte(tokens[byte - 1]):
            byte -= 1
        return self._settled(tokens[:byte])


def _text_after(
    vocabulary: Vocabulary, given: Sequence[int], is_echoed: bool = False
) -> Callable[[Sequence[int]], str]:
    """Returns a function from tokens to the text that the tokens add to the text of `given`.

    If the given tokens end within a character, the text begins with that character.
    """
    # The last given tokens are enough, and much faster after a long prompt, if they have a complete
    # character besides spaces, which a decoder may drop.
    context = list(given[-_CONTEXT:])
    if not vocabulary.text_of(context).strip(f"{_INCOMPLETE} "):
        context = list(given)
    before = echo(vocabulary, context) if is_echoed else vocabulary.text_of(context)

    def text_of(tokens: Sequence[int]) -> str:
        text = vocabulary.text_of([*context, *tokens])
        if text.startswith(before):
            return text[len(before) :]
        return text[len(os.path.commonprefix([before, text])) :]

    return text_of


def _complete(text: str) -> str:
    """Returns the text without a last character whose bytes may not all be there yet."""
    return text.rstrip(_INCOMPLETE)


def overlap(text: str, end: str) -> int:
    """Returns the length of the longest end of a text that `end` begins with."""
    longest = min(len(text), len(end) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(end[:n])), 0)
