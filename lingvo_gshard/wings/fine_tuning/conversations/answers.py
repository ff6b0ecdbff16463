"""Answers: finds the turns of the assistant in the text that a chat template writes.

A template does not say where an answer begins and ends. Both are found by comparing what it writes
for parts of the conversation.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.examples import ASSISTANT, Example
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary

# Begin and end of a part of a text, in characters or in tokens.
Span: TypeAlias = tuple[int, int]

# Seconds for the answers of one conversation.
_SECONDS = 20.0
# Conversations with more answers are outlined first.
_FEW = 8
# Characters that no text has, around the content of each turn.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_OUTLINED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


class Tokenized:
    """A text that a template wrote, as ids, with special tokens where the text names them."""

    def __init__(self, vocabulary: Vocabulary, text: str):
        """Encodes a text."""
        self.text, self.ids = text, encode_marked(vocabulary, text)
        self._vocabulary = vocabulary

    def tokens_of(self, span: Span) -> Span:
        """Returns the first token of a part of the text, and the one after its last token.

        A token that has characters of the part belongs to it.
        """
        begins, ends = self._places
        first = int(np.searchsorted(ends, span[0], side="right"))
        last = int(np.searchsorted(begins, span[1], side="left"))
        return (first, last) if first < last else (0, 0)

    def last_end(self, place: int) -> int:
        """Returns where the last token ends that is complete before a place in the text."""
        ends = self._places[1]
        found = int(np.searchsorted(ends, place, side="right"))
        return int(ends[found - 1]) if found else 0

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Begin and end of each token in characters, both in order."""
        places = []
        for begin, part, special in _parts(self._vocabulary, self.text):
            if special is None:
                found = self._vocabulary.places(part)
                places += [(begin + first, begin + last) for first, last in found]
            else:
                places.append((begin, begin + len(part)))
        found = np.asarray(places, np.int64).reshape(-1, 2)
        begins = np.minimum.accumulate(found[::-1, 0])[::-1]
        return begins, np.maximum.accumulate(found[:, 1])


class Answers:
    """Finds the tokens of answers."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate):
        """Takes over a vocabulary and the template that writes conversations."""
        self._vocabulary, self._template = vocabulary, template

    def find(
        self, example: Example, written: Tokenized, turns: Sequence[int]
    ) -> tuple[list[int], list[Span]]:
        """Returns the ids of a conversation, and where the answers of some turns are in them.

        An answer ends with the token that ends generation. Where the template writes none after
        the last turn, the ids have one more.

        Raises:
          UserError: the text of the first turns is no beginning of the whole text.
        """
        conversation = _Conversation(self._template, example, written.text)
        ids, spans, last_turn = list(written.ids), [], len(example.messages) - 1
        for turn in turns:
            span = conversation.span(turn, self._vocabulary)
            first, last = self._until_stop(ids, *written.tokens_of(span))
            is_open = last == len(ids) and ids[-1] not in self._stops
            if is_open and turn == last_turn:
                last, stop = self._ending(conversation, written, first)
                ids[last:] = [stop]
                last += 1
            spans.append((first, last))
        return ids, spans

    def _until_stop(self, ids: Sequence[int], first: int, last: int) -> Span:
        """Returns the places of an answer up to the token that ends it, if there is one.

        What templates write after that, such as a line's end, is never generated. The marker of
        the next turn belongs to the answer if it is what ends generation, as in GLM.
        """
        found = [place for place in range(first, last) if ids[place] in self._stops]
        if found:
            return first, found[-1] + 1
        follows = first < last < len(ids) and ids[last] in self._stops
        return first, last + follows

    @functools.cached_property
    def _stops(self) -> frozenset[int]:
        """Ids that may end an answer."""
        return frozenset((*self._vocabulary.end_ids, *_turn_ends(self._vocabulary, self._template)))

    def _ending(
        self, conversation: _Conversation, written: Tokenized, first: int
    ) -> tuple[int, int]:
        """Returns where a last answer without a stop ends, and a stop for it.

        The stop is the marker of the next turn, if that ends generation, and else the end of a
        text. Some templates begin another answer after the last one.
        """
        followed, ids = conversation.followed(), written.ids
        if followed is None:
            return len(ids), self._vocabulary.eos_id
        longer = encode_marked(self._vocabulary, followed)
        place = shared(ids, longer)
        if place <= first or self._vocabulary.text_of(ids[place:]).strip():
            return len(ids), self._vocabulary.eos_id
        marker = longer[place] if place < len(longer) else -1
        return place, marker if marker in self._vocabulary.end_ids else self._vocabulary.eos_id


class _Conversation:
    """A conversation whose answers are looked for in what a template writes."""

    def __init__(self, template: ChatTemplate, example: Example, text: str):
        self._messages, self._text = example.messages, text
        self._render = functools.partial(
            template.render, tools=example.tools, values=example.values
        )
        self._deadline = time.monotonic() + _SECONDS
        # (what stands around an answer) -> characters from its content to its begin and end.
        self._found: dict[Any, Span] = {}

    def span(self, turn: int, vocabulary: Vocabulary) -> Span:
        """Returns begin and end of a turn in the text, in characters.

        A turn begins where the text of the turns before ends, with the beginning of an answer. It
        ends where the text goes on in another way if another turn follows.

        Raises:
          UserError: the text of the first turns is no beginning of the whole text.
        """
        outline, messages = self._outline, self._messages
        if outline is None or messages[turn].keys() - {"role", "content"}:
            return self._compared(turn, vocabulary)
        (begin, end), after = outline[turn], turn + 1 < len(messages)
        before = outline[turn - 1][1] if turn else 0
        following = outline[turn + 1][0] if after else len(self._text)
        surroundings = (self._text[before:begin], self._text[end:following], after)
        if surroundings not in self._found:
            first, last = self._compared(turn, vocabulary)
            if not before <= first <= begin <= end <= last <= following:
                return first, last
            self._found[surroundings] = begin - first, last - end
        left, right = self._found[surroundings]
        return begin - left, end + right

    @functools.cached_property
    def _outline(self) -> list[Span] | None:
        """The places of the turns' contents in the text.

        It is None if there are few answers, or if the template changes contents.
        """
        contents = [message.get("content") for message in self._messages]
        if sum(message["role"] == ASSISTANT for message in self._messages) <= _FEW:
            return None
        if not all(isinstance(content, str) and content for content in contents):
            return None
        messages = [
            {**message, "content": f"{_OPEN}{content}{_CLOSE}"}
            for message, content in zip(self._messages, contents, strict=True)
        ]
        try:
            text = self._render(messages).text
        except UserError:
            return None
        found = list(_OUTLINED.finditer(text))
        if [match[1] for match in found] != contents:
            return None
        if _OUTLINED.sub(r"\1", text) != self._text:
            return None
        starts = [match.start() - 2 * number for number, match in enumerate(found)]
        return [(start, start + len(match[1])) for start, match in zip(starts, found, strict=True)]

    def _compared(self, turn: int, vocabulary: Vocabulary) -> Span:
        """Returns the place of a turn by what the template writes for the turns up to it."""
        if time.monotonic() > self._deadline:
            raise UserError(
                f"to find the answers of a conversation of {len(self._messages)} turns takes "
                f"longer than {_SECONDS:g} s. A template with {{% generation %}} marks them"
            )
        is_last = turn + 1 == len(self._messages)
        upto = self._text if is_last else self._render(self._messages[: turn + 1]).text
        begin = self._begin(turn, upto)
        # Some templates write a token after the last turn only.
        end = shared(self._text, upto)
        rest = upto[end:]
        if end < len(upto):
            end = Tokenized(vocabulary, upto).last_end(end)
            rest = upto[end:]
        is_silent = not vocabulary.text_of(encode_marked(vocabulary, rest)).strip()
        if not (begin <= end and (is_silent or self._text.endswith(rest))):
            self._refuse(turn)
        return begin, end

    def _begin(self, turn: int, upto: str) -> int:
        """Returns where an answer begins in the text up to it."""
        before = self._before(turn, add_generation_prompt=True)
        plain = self._before(turn)
        if before != plain and upto.startswith(before):
            return len(before)
        # The template does not begin an answer, or in another way than it writes answers.
        if not upto.startswith(plain):
            self._refuse(turn)
        first, second = (
            self._render([*self._messages[:turn], {"role": ASSISTANT, "content": content}]).text
            for content in ("a", "1")
        )
        header = first[: shared(first, second)]
        has_marker = upto.startswith(header) and header[len(plain) :].strip()
        return len(header) if has_marker else len(plain)

    def _before(self, turn: int, add_generation_prompt: bool = False) -> str:
        try:
            return self._render(
                self._messages[:turn], add_generation_prompt=add_generation_prompt
            ).text
        except UserError:
            # Many templates look at the first turn.
            if turn:
                raise
            return ""

    def _refuse(self, turn: int) -> NoReturn:
        raise UserError(
            f"the chat template writes turn {turn + 1} in another way once further turns "
            'follow, so its place cannot be found. input.learn = "last" learns the last '
            "turn only"
        )

    def followed(self) -> str | None:
        """Returns the text with one more turn; None if the template cannot write it."""
        role = "tool" if self._messages[-1].get("tool_calls") else "user"
        try:
            return self._render([*self._messages, {"role": role, "content": "a"}]).text
        except UserError:
            return None


def end_of_turn(vocabulary: Vocabulary, template: ChatTemplate) -> tuple[int, ...]:
    """Returns the ids that end an answer, of tokens without text that the template writes.

    They are what the template writes after an answer or, if it writes nothing there, the markers of
    the turns that may follow, as in GLM. A model that was not told all ids that end its texts goes
    on after these, with a turn of the user.
    """
    tails = _tails(vocabulary, template)
    last, user, assistant = tails[""] or (), tails["user"], tails[ASSISTANT] or ()
    if user and user[:1] != assistant[:1] and last in ((), assistant):
        tool = (tails["tool"] or ())[:1]
        return (*user[:1], *(tool if tool != assistant[:1] else ()))
    is_end = user is None or user[:1] == last[:1]
    return last[:1] if is_end and not _ends_thoughts(vocabulary, template, last[:1]) else ()


def _ends_thoughts(vocabulary: Vocabulary, template: ChatTemplate, end: tuple[int, ...]) -> bool:
    """Returns whether the end of an answer also ends a thought, so that generation goes on."""
    answer = {"role": ASSISTANT, "content": _CLOSE, "reasoning": _OPEN}
    try:
        text = template.render([{"role": "user", "content": "question"}, answer]).text
    except UserError:
        return False
    between = text.partition(_OPEN)[2].partition(_CLOSE)[0]
    return not {*end}.isdisjoint(encode_marked(vocabulary, between))


def _turn_ends(vocabulary: Vocabulary, template: ChatTemplate) -> tuple[int, ...]:
    """Returns the ids that the template writes after answers, whoever speaks next."""
    tails = _tails(vocabulary, template)
    user, ends = tails["user"], end_of_turn(vocabulary, template)
    if not user or not tails[""]:
        return ends
    # gpt-oss ends the last answer in another way. A marker of its own begins the next turn.
    is_closed = user == tails[ASSISTANT] and len(user) == 2 and user[0] != tails[""][0]
    return (*ends, user[0]) if is_closed else ends


def _tails(vocabulary: Vocabulary, template: ChatTemplate) -> dict[str, tuple[int, ...] | None]:
    """Returns role of the next turn -> the first two ids after an answer, up to one with text.

    The role "" is for no further turn. The ids are None if the template does not write such turns.
    """
    turns = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"}]

    def after(role: str) -> tuple[int, ...] | None:
        more = [{"role": role, "content": "more"}] if role else []
        try:
            text = template.render([*turns, *more]).text
        except UserError:
            return None
        ids = encode_marked(vocabulary, text.rpartition("answer")[2].strip())[:2]
        spoken = (place for place, index in enumerate(ids) if vocabulary.text_of([index]))
        return tuple(ids[: next(spoken, len(ids))])

    return {role: after(role) for role in ("", "user", ASSISTANT, "tool")}


def shared(a: Sequence[int] | str, b: Sequence[int] | str) -> int:
    """Returns how many ids or characters two sequences have in common at their beginnings."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def encode_marked(vocabulary: Vocabulary, text: str) -> list[int]:
    """Returns the ids of a text that a template wrote, with special tokens where it names them."""
    ids: list[int] = []
    for _, part, special in _parts(vocabulary, text):
        ids += vocabulary.encode(part) if special is None else [special]
    return ids


def _parts(vocabulary: Vocabulary, text: str) -> Iterator[tuple[int, str, int | None]]:
    """Yields the parts of a text with their places, and the ids of those that are special tokens.

    Vocabularies that were trained here never give their special tokens for a text. The encoders of
    published models know theirs.
    """
    if isinstance(vocabulary, PublishedVocabulary):
        yield 0, text, None
        return
    special = {vocabulary.piece(i): i for i in (vocabulary.bos_id, *vocabulary.end_ids)}
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    begin = 0
    for part in re.split(f"({pattern})", text):
        yield begin, part, special.get(part)
        begin += len(part)
