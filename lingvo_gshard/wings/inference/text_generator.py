"""TextGenerator: continues beginnings of texts with an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.core import UserError
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.requests import Answer, Finished, Hypothesis, Request
from lingvo_gshard.wings.inference.text import GrowingText, continuation, stop_check


@dataclasses.dataclass(frozen=True)
class Text:
    """The texts that continue one beginning.

    Attributes:
      texts: complete texts, each starting with the beginning.
      cut: number of tokens at the start of the beginning that the model did not see, because the
        row had no room. Those before all texts do not count.
      hypotheses: the new tokens of each text with their log-probabilities.
      seed: the seed that drew the texts; None if none was drawn.
    """

    texts: list[str]
    cut: int
    hypotheses: tuple[Hypothesis, ...]
    seed: int | None


class TextGenerator:
    """Continues beginnings of texts with one language model.

    A row of the model has `length` tokens. `most_tokens` of them are reserved for new tokens. If a
    beginning is too long for the rest, the model sees only the last part of the beginning.
    """

    # As in `Decoding`.
    HAS_SOURCE = False

    def __init__(
        self, engine: Engine, vocabulary: Vocabulary, options: DecodingOptions | None = None
    ):
        """Prepares to write.

        Args:
          options: how to choose tokens; None draws them.

        Raises:
          UserError: `most_tokens` is more than a row has.
        """
        self.engine, self._vocabulary = engine, vocabulary
        self._options = options or DRAWING
        length, most = engine.facts.most_positions, self._options.most_tokens
        if most > length:
            raise UserError(f"most_tokens is {most}; 0 to {length}, a row, was expected")

    @property
    def has_beam(self) -> bool:
        """Whether it searches with a beam, whose texts cannot be streamed."""
        return self._options.beam_size > 1

    def write(self, beginnings: Sequence[str]) -> Iterator[Text]:
        """Yields a Text for each beginning, in order; an empty one lets the model begin."""
        encoded = [self._vocabulary.encode(text) for text in beginnings]
        answers = self.engine.submit_all([self._request(ids) for ids in encoded])
        for ids, answer in zip(encoded, answers, strict=True):
            yield self._text(ids, answer)

    def stream(self, beginning: str) -> Iterator[str]:
        """Yields the text that continues a beginning, piece by piece as it is generated.

        Raises:
          UserError: the options ask for several texts, or for a beam.
        """
        return self._pieces(self._stream(self._vocabulary.encode(beginning)))

    def write_streamed(self, beginning: str, show: Callable[[str], None]) -> Text:
        """Returns the Text of a beginning, and shows it while it is generated.

        Args:
          beginning: the start of the text; empty lets the model begin.
          show: called with each new piece of the text. The first piece starts with the beginning.

        Raises:
          UserError: the options ask for several texts, or for a beam.
        """
        ids = self._vocabulary.encode(beginning)
        answer = self._stream(ids)
        shown = self._vocabulary.text_of(ids)
        for piece in self._pieces(answer):
            show(shown + piece)
            shown = ""
        if shown:
            show(shown)
        return self._text(ids, answer)

    def pieces(self, hypothesis: Hypothesis) -> list[str]:
        """Returns the text of each new token, `▁` for a space."""
        return [self._vocabulary.piece(token) for token in hypothesis.tokens]

    def _stream(self, ids: list[int]) -> Answer:
        if self._options.best > 1 or self._options.beam_size > 1:
            raise UserError("streaming writes one text: set best=1 and beam_size=1")
        return self.engine.submit(dataclasses.replace(self._request(ids), streams=True))

    def _pieces(self, answer: Answer) -> Iterator[str]:
        """Yields the text of an answer piece by piece, without the request's given tokens."""
        text = GrowingText(self._vocabulary, answer.request.given, self._options.stop)
        try:
            for event in answer:
                is_last = isinstance(event, Finished)
                new = text.add(() if is_last else event.tokens, is_last)
                if new:
                    yield new
        finally:
            answer.cancel()

    def _request(self, ids: list[int]) -> Request:
        length = self.engine.facts.most_positions
        # The last new token takes no position.
        room = length - (self._options.most_tokens or (length + 1) // 2) + 1
        given = self._vocabulary.begin(ids)[-room:]
        should_stop = stop_check(self._vocabulary, given, self._options)
        return Request(given=given, options=self._options, should_stop=should_stop)

    def _text(self, ids: list[int], answer: Answer) -> Text:
        """Waits for the answer to a request and returns its texts."""
        found = answer.result()
        vocabulary, stop = self._vocabulary, self._options.stop
        beginning, given = vocabulary.text_of(ids), answer.request.given
        texts = [beginning + continuation(vocabulary, given, h.tokens, stop) for h in found]
        return Text(texts, max(len(ids) - len(given), 0), found, answer.request.seed)
