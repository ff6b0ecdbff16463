"""Tool calls: finds calls of functions in answers, in the formats of published chat templates.

A template shows the model how to write a call. Known formats are Hermes's, which Qwen has, too
(https://github.com/NousResearch/Hermes-Function-Calling), Llama 3's, Mistral's and DeepSeek-V3's.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference.text import GrowingText, overlap

_JSON = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to write calls.

    Attributes:
      marks: the texts around calls, which are special tokens in some vocabularies. A template that
        has the first one, and asks for no other format, has this format.
      call: matches what is before the JSON of a call. The group `name` has the function's name;
        without it, the JSON is an object, or a list of them, with name and arguments.
      bare: whether an answer that begins with an object is a call as well.
    """

    marks: tuple[str, ...]
    call: re.Pattern[str]
    bare: bool = False

    def start(self, text: str) -> int:
        """Returns where calls begin in a text, or may begin once more of it is there."""
        if self.bare and text.lstrip()[:1] in ("{", ""):
            return 0
        found = text.find(self.marks[0])
        return found if found >= 0 else len(text) - overlap(text, self.marks[0])

    def calls(self, text: str) -> list[tuple[str, Any]]:
        """Returns name and arguments of each call in a text; none if one is not well written."""
        try:
            return list(self._calls(text))
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    def _calls(self, text: str) -> Iterator[tuple[str, Any]]:
        place = 0
        while match := self.call.search(text, place):
            value, place = _JSON.raw_decode(text, match.end())
            if name := match.groupdict().get("name"):
                yield name, value
                continue
            for each in value if isinstance(value, list) else [value]:
                key = "arguments" if "arguments" in each else "parameters"
                yield each["name"], each[key]


_FORMATS = (
    Format(("<tool_call>", "</tool_call>"), re.compile(r"<tool_call>\s*(?=\{)")),
    Format(
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        re.compile(
            r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)|(?=\[))"
        ),
    ),
    Format(
        tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end")),
        re.compile(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)"
            r"(?:<｜tool▁sep｜>|\s*```json)\s*"
        ),
    ),
    Format(("<|python_tag|>",), re.compile(r"(?:^|<\|python_tag\|>|;)\s*(?=\{)"), bare=True),
)
# Templates with the marker of a format that write calls in another one.
_OTHERS = re.compile(r"<function=|<arg_key>|<｜DSML｜")


def format_of(template: str) -> Format | None:
    """Returns the format that a template asks for; None if it is unknown."""
    if _OTHERS.search(template):
        return None
    return next((each for each in _FORMATS if each.marks[0] in template), None)


def calls_json(calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Returns calls in OpenAI's format. Templates of Mistral want ids of nine letters or digits."""
    return [
        {
            "index": index,
            "id": uuid.uuid4().hex[:9],
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(values, ensure_ascii=False)},
        }
        for index, (name, values) in enumerate(calls)
    ]


class CallingText(GrowingText):
    """A text that may end with calls of functions, which are no part of what `add` returns.

    Attributes:
      calls: name and arguments of each call, once the text is complete.
    """

    def __init__(self, form: Format, vocabulary: Vocabulary, *given: Any):
        """Begins a text whose calls have a format; see `GrowingText` for the rest."""
        super().__init__(vocabulary, *given)
        self._form, self._text, self._sent = form, "", 0
        ids = {mark: vocabulary.encode(mark) for mark in form.marks}
        self._unspoken = {
            found[0]: mark
            for mark, found in ids.items()
            if len(found) == 1 and not vocabulary.text_of(found)
        }

    def _text_of(self, tokens: Sequence[int]) -> str:
        parts, begin = [], 0
        for place, token in enumerate(tokens):
            if token in self._unspoken:
                parts += (super()._text_of(tokens[begin:place]), self._unspoken[token])
                begin = place + 1
        return "".join((*parts, super()._text_of(tokens[begin:])))

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        self._text += super().add(tokens, is_last)
        end = self._form.start(self._text)
        if is_last:
            self.calls = self._form.calls(self._text[end:])
            end = end if self.calls else len(self._text)
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return new
