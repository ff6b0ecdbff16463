"""Encoder: turns examples into ids, each with a mark whether the loss counts it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.conversations.chat_template import ChatTemplate, Message
from lingvo_gshard.data.conversations.examples import ASSISTANT, Example
from lingvo_gshard.data.vocabularies.published_vocabulary import PublishedVocabulary
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

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
        """Takes over a vocabulary.

        Args:
          vocabulary: encodes texts.
          template: writes conversations; None if there are none.
          learned: one of LEARNED.
        """
        self._vocabulary, self._template, self._learned = vocabulary, template, learned

    def encode(self, example: Example) -> Encoded:
        """Returns the ids of an example.

        Raises:
          UserError: the template refuses it, or its answers cannot be found in the text.
        """
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
        given, _ = self._tokens_of(whole, text, (len(example.prompt), len(text)))
        ids = [*begun, vocabulary.eos_id]
        return self._counted(ids, [(len(begun) - len(whole) + given, len(ids))])

    def _encode_conversation(self, example: Example) -> Encoded:
        if self._template is None:
            raise UserError(
                "the model has no chat template; input.template names a file with one, in Jinja"
            )
        rendered = self._template.render(example.messages, example.tools, values=example.values)
        ids = encode_marked(self._vocabulary, rendered.text)
        if self._learned == EVERYTHING:
            return self._counted(ids, [(0, len(ids))])
        if rendered.spans:
            spans = self._wanted(example, rendered.spans)
            return self._counted(ids, [self._tokens_of(ids, rendered.text, s) for s in spans])
        spans = self._answers(example, rendered.text)
        tokens = [self._tokens_of(ids, rendered.text, span) for span in spans]
        return self._counted(ids, [self._until_end(ids, *places) for places in tokens])

    def _wanted(self, example: Example, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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
        turns = _answers_of(example.messages)
        turns = turns[-1:] if self._learned == LAST else turns
        first = len(example.prompt)
        return [turn for turn in turns if turn >= first and example.messages[turn].get("weight", 1)]

    def _answers(self, example: Example, text: str) -> list[tuple[int, int]]:
        """Returns begin and end of each learned turn in the text, in characters.

        A turn begins where the text of the turns before ends, with the beginning of an answer.

        Raises:
          UserError: the text of the first turns is no beginning of the whole text.
        """
        assert self._template is not None
        render = functools.partial(
            self._template.render, tools=example.tools, values=example.values
        )
        spans = []
        for turn in self._chosen(example):
            messages = example.messages
            before = render(messages[:turn], add_generation_prompt=True).text
            is_last = turn + 1 == len(messages)
            upto = text if is_last else render(messages[: turn + 1]).text
            if not upto.startswith(before):
                # Without a beginning of its own, an answer follows the turns before it.
                before = render(messages[:turn]).text
            # Some templates write a token after the last turn only.
            end = shared(text, upto)
            if not (upto.startswith(before) and end >= len(before) and text.endswith(upto[end:])):
                raise UserError(
                    f"the chat template writes turn {turn + 1} in another way once further turns "
                    'follow, so its place cannot be found. input.learn = "last" learns the last '
                    "turn only"
                )
            spans.append((len(before), end))
        return spans

    def _tokens_of(self, ids: Sequence[int], text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Returns the first token of a part of a text, and the one after its last token.

        A token that has characters of the part belongs to it.
        """
        vocabulary = self._vocabulary
        places = vocabulary.places(text) if isinstance(vocabulary, PublishedVocabulary) else None
        if places is not None:
            found = [i for i, (b, e) in enumerate(places) if b < span[1] and e > span[0]]
            return (found[0], found[-1] + 1) if found else (0, 0)
        begin, end = (encode_marked(vocabulary, text[:place]) for place in span)
        last = shared(ids, end)
        return shared(ids, begin), last + (len(end) > last)

    def _until_end(self, ids: Sequence[int], first: int, last: int) -> tuple[int, int]:
        """Returns the places of an answer up to the token that ends a text, if it has one.

        What templates write after it, such as a line's end, is never generated.
        """
        ends = set(self._vocabulary.end_ids)
        found = [place for place in range(first, last) if ids[place] in ends]
        return first, found[-1] + 1 if found else last

    def _counted(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Encoded:
        counts = np.zeros(len(ids), np.int32)
        for begin, end in spans:
            counts[begin:end] = 1
        # The first id is given and never predicted.
        counts[:1] = 0
        return Encoded(np.asarray(ids, np.int32), counts)


def end_of_turn(vocabulary: Vocabulary, template: ChatTemplate) -> tuple[int, ...]:
    """Returns the id that the template writes after an answer, if it is a token without text.

    A model that was not told all ids that end its texts goes on after this one, with a turn of the
    user.

    Args:
      vocabulary: the model's vocabulary.
      template: writes conversations.
    """
    answer = "ok"
    turns = [{"role": "user", "content": answer}, {"role": ASSISTANT, "content": answer}]
    try:
        text = template.render(turns).text
    except UserError:
        return ()
    tail = text[text.rfind(answer) + len(answer) :].strip()
    ids = encode_marked(vocabulary, tail)
    is_silent = ids and not vocabulary.text_of(ids[:1])
    return tuple(ids[:1]) if is_silent else ()


def _answers_of(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of the assistant's turns."""
    return [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]


def shared(a: Sequence[int] | str, b: Sequence[int] | str) -> int:
    """Returns how many ids or characters two sequences have in common at their beginnings."""
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


def encode_marked(vocabulary: Vocabulary, text: str) -> list[int]:
    """Returns the ids of a text that a template wrote, with special tokens where it names them.

    Args:
      vocabulary: encodes the text.
      text: a text with all special tokens that the model is to see.
    """
    if isinstance(vocabulary, PublishedVocabulary):
        # Its encoder knows special tokens.
        return vocabulary.encode(text)
    # Vocabularies that were trained here never give their special tokens for a text.
    special = {vocabulary.piece(i): i for i in (vocabulary.bos_id, *vocabulary.end_ids)}
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        ids += [special[part]] if part in special else vocabulary.encode(part)
    return ids
