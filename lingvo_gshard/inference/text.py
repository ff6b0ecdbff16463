"""Texts under way: stop strings, and text as it grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.inference.options import DecodingOptions

# What the decoder shows for a character whose bytes are not all there yet.
_INCOMPLETE = "\ufffd"


def stop_check(
    vocabulary: Vocabulary, options: DecodingOptions
) -> Callable[[Sequence[int]], bool] | None:
    """Returns a function that says whether tokens contain a stop string, or another end of text.

    It is None if neither can be, and with a beam. The engine itself ends a text at the vocabulary's
    `eos_id`.
    """
    stop = options.stop
    ends = frozenset(vocabulary.end_ids) - {vocabulary.eos_id}
    if options.beam_size > 1 or not (stop or ends):
        return None

    def is_stopped(tokens: Sequence[int]) -> bool:
        if not ends.isdisjoint(tokens):
            return True
        if not stop:
            return False
        text = vocabulary.decode(tokens)
        return any(end in text for end in stop)

    return is_stopped


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string in it."""
    ends = [position for end in stop if (position := text.find(end)) >= 0]
    return text[: min(ends)] if ends else text


def continuation(
    vocabulary: Vocabulary, given: Sequence[int], tokens: Sequence[int], stop: Sequence[str]
) -> str:
    """Returns the text that `tokens` add to that of `given`, up to the first stop string."""
    start = len(vocabulary.decode(given))
    return cut_at_stop(vocabulary.decode([*given, *tokens])[start:], stop)


class GrowingText:
    """The text of tokens that are generated one after another.

    A piece of text is given out when no later token can change it: not before its characters are
    complete, and not while it may be the start of a stop string.
    """

    def __init__(self, vocabulary: Vocabulary, given: Sequence[int] = (), stop: Sequence[str] = ()):
        """Begins a text.

        Args:
          vocabulary: decodes tokens.
          given: ids before the text. They decide whether it begins with a space.
          stop: texts that end it.
        """
        self._vocabulary, self._stop = vocabulary, stop
        self._tokens = list(given)
        self._start = len(vocabulary.decode(self._tokens))
        self._shown = 0

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Returns the text that tokens add.

        Args:
          tokens: the next ids.
          is_last: whether no token follows.
        """
        self._tokens += tokens
        text = self._vocabulary.decode(self._tokens)[self._start :]
        cut = cut_at_stop(text, self._stop)
        if not is_last and cut == text:
            kept = max((_overlap(text, end) for end in self._stop), default=0)
            cut = text[: len(text) - kept].rstrip(_INCOMPLETE)
        new, self._shown = cut[self._shown :], max(self._shown, len(cut))
        return new


def _overlap(text: str, end: str) -> int:
    """Returns the length of the longest end of a text that `end` begins with."""
    longest = min(len(text), len(end) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(end[:n])), 0)
