"""Encoder: turns examples into ids, each with a mark whether the loss counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.fine_tuning.conversations.answers import Answers, Span, Tokenized
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate, Message
from lingvo_gshard.wings.fine_tuning.conversations.examples import ASSISTANT, Example

# The loss counts the turns of the assistant, only the last of these turns, or everything.
ANSWERS, LAST, EVERYTHING = LEARNED = ("answers", "last", "everything")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of an example.

    Attributes:
      ids: int32 [T]. The first is given, each other one is predicted.
      counts: int32 [T], 1 where the loss counts the prediction of an id, else 0.
    """

    ids: np.ndarray
    counts: np.ndarray


class Encoder:
    """Turns examples into ids."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None, learned: str):
        """Takes over a vocabulary, and a template unless there are no conversations."""
        self._vocabulary, self._template, self._learned = vocabulary, template, learned
        self._answers = Answers(vocabulary, template) if template else None

    def encode(self, example: Example) -> Encoded:
        """Returns the ids of an example. Raises UserError if its template cannot render it."""
        if example.is_text:
            return self._encode_text(example)
        return self._encode_conversation(example)

    def _encode_text(self, example: Example) -> Encoded:
        """Returns the ids of a pair: the completion counts, and so does the end of the text."""
        vocabulary = self._vocabulary
        assert isinstance(example.prompt, str) and isinstance(example.completion, str)
        text = example.prompt + example.completion
        whole = vocabulary.encode(text)
        begun = vocabulary.begin(whole)
        given, _ = Tokenized(vocabulary, text).tokens_of((len(example.prompt), len(text)))
        ids = [*begun, vocabulary.eos_id]
        return _counted(ids, [(len(begun) - len(whole) + given, len(ids))])

    def _encode_conversation(self, example: Example) -> Encoded:
        if self._template is None:
            raise UserError(
                "the model has no chat template; input.template names a file with one, in Jinja"
            )
        rendered = self._template.render(example.messages, example.tools, values=example.values)
        written = Tokenized(self._vocabulary, rendered.text)
        if self._learned == EVERYTHING:
            return _counted(written.ids, [(0, len(written.ids))])
        if rendered.spans:
            spans = self._wanted(example, rendered.spans)
            return _counted(written.ids, map(written.tokens_of, spans))
        assert self._answers is not None
        return _counted(*self._answers.find(example, written, self._chosen(example)))

    def _wanted(self, example: Example, spans: Sequence[Span]) -> list[Span]:
        """Returns the marked spans of the turns that are learned."""
        turns = _answers_of(example.messages)
        if len(turns) != len(spans):
            # The template joins or splits turns: all that it marks is learned.
            return list(spans[-1:] if self._learned == LAST else spans)
        chosen = set(self._chosen(example))
        return [span for turn, span in zip(turns, spans, strict=True) if turn in chosen]

    def _chosen(self, example: Example) -> list[int]:
        """Returns the numbers of the turns that are learned.

        A turn with a `weight` of 0 is not, as in OpenAI's format. Turns of the prompt are not.
        """
        messages = example.messages
        turns = _answers_of(messages)
        turns = turns[-1:] if self._learned == LAST else turns
        first = len(example.prompt)
        return [turn for turn in turns if turn >= first and messages[turn].get("weight") != 0]


def _counted(ids: Sequence[int], spans: Iterable[Span]) -> Encoded:
    """Returns ids with marks at the parts that spans name."""
    counts = np.zeros(len(ids), np.int32)
    for begin, end in spans:
        counts[begin:end] = 1
    # The first id is given and never predicted.
    counts[:1] = 0
    return Encoded(np.asarray(ids, np.int32), counts)


def _answers_of(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of the assistant's turns."""
    return [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
