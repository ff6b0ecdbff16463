"""Tool calls: finds calls of functions in answers, in the formats of published chat templates.

A template shows the model how to write a call. Known formats with JSON are Hermes's, which Qwen
has, too (https://github.com/NousResearch/Hermes-Function-Calling), Llama 3's, Mistral's,
DeepSeek-V3's and Kimi K2's. Gemma 4's has JSON with other quotes. Those of Qwen3-Coder, GLM-4.5,
MiniMax-M2 and DeepSeek-V3.2 have a tag for each argument.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import objects
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference.text import GrowingText, overlap

_JSON = json.JSONDecoder()
# Constants that are no texts, as templates with a tag for each argument write them.
_CONSTANTS = {"True": True, "False": False, "None": None}
# The types of arguments, as JSON schemas name them, by the function's and the argument's name.
Types = Mapping[str, Mapping[str, Any]]


class Format(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """A way to write calls.

    Attributes:
      marks: the texts around calls, which are special tokens in some vocabularies.
      call: matches what is before the JSON of a call. The group `name` has the function's name;
        without it, the JSON is an object, or a list of them, with name and arguments.
      bare: whether an answer that begins with an object is a call as well.
      sign: a text that only templates with this format contain; by default the first mark.
    """

    marks: tuple[str, ...]
    call: str
    bare: bool = False
    sign: str = ""

    def start(self, text: str) -> int:
        """Returns where calls begin in a text, or may begin once more of it is there."""
        if self.bare and text.lstrip()[:1] in ("{", ""):
            return 0
        found = text.find(self.marks[0])
        return found if found >= 0 else len(text) - overlap(text, self.marks[0])

    def calls(self, text: str, types: Types) -> list[tuple[str, Any]]:
        """Returns name and arguments of each call in a text; none if one is not well written."""
        try:
            return list(self._calls(text, types))
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    def _calls(self, text: str, types: Types) -> Iterator[tuple[str, Any]]:
        del types
        place = 0
        while match := re.compile(self.call).search(text, place):
            value, place = _JSON.raw_decode(text, match.end())
            if name := match.groupdict().get("name"):
                yield name, value
                continue
            for each in value if isinstance(value, list) else [value]:
                key = "arguments" if "arguments" in each else "parameters"
                yield each["name"], each[key]


# A text, or the name of a field, as Gemma 4 writes them.
_QUOTED = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?<=[{,])\s*(?P<key>[^\s"{}\[\],:<]+)(?=:)', re.DOTALL
)


class QuotedFormat(Format, frozen=True, tag="quoted"):
    """A way to write calls in JSON whose quotes are a token, and whose names have no quotes."""

    def _calls(self, text: str, types: Types) -> Iterator[tuple[str, Any]]:
        plain = _QUOTED.sub(lambda found: json.dumps(found[found.lastgroup or 0]), text)
        return super()._calls(plain, types)


class TaggedFormat(Format, frozen=True, kw_only=True, tag="tagged"):
    """A way to write calls with a tag for each argument.

    The second mark ends a call, or the last of several. `call` matches a whole call; its group
    `body` has the arguments.

    Attributes:
      argument: matches an argument, by the groups `key` and `value`. The group `string`, if there
        is one, says whether the value is a text; otherwise the function's declaration does.
    """

    argument: str

    def _calls(self, text: str, types: Types) -> Iterator[tuple[str, Any]]:
        end = 0
        for match in re.finditer(self.call, text):
            end = match.end()
            declared = types.get(match["name"], {})
            found = re.finditer(self.argument, match["body"])
            yield match["name"], {each["key"]: _value(each, declared) for each in found}
        rest = text[end:].lstrip()
        if not rest.startswith(self.marks[1]) or self.marks[0] in rest:
            raise ValueError("a call has no end")


def _value(argument: re.Match[str], declared: Mapping[str, Any]) -> Any:
    """Returns the value of an argument: a text, or what its JSON says."""
    text, said = argument["value"], argument.groupdict().get("string")
    kinds = declared.get(argument["key"]) if said is None else {"true": "string"}.get(said)
    if kinds and "string" in kinds:
        return text
    try:
        return _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
    except ValueError:
        return text


def types_in(tools: Sequence[Any]) -> Types:
    """Returns the types that declarations of functions, in OpenAI's format, give arguments."""
    found: dict[str, dict[str, Any]] = {}
    for function in (_field(tool, "function") for tool in tools):
        properties = _field(_field(function, "parameters"), "properties")
        found[str(function.get("name"))] = {
            key: _field(properties, key).get("type") for key in properties
        }
    return found


def _field(value: Any, key: str) -> dict[str, Any]:
    """Returns an object within an object of JSON; an empty one if it is not there."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


_FORMATS = objects.table_beside(
    __file__, "tool_calls.toml", dict[str, list[Format | QuotedFormat | TaggedFormat]]
)["formats"]


def format_of(template: str) -> Format | None:
    """Returns the format that a template asks for; None if it is unknown."""
    return next((each for each in _FORMATS if (each.sign or each.marks[0]) in template), None)


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
    """A text that may end with calls of functions: `add` omits them, `calls` has them later."""

    def __init__(self, form: Format, types: Types, vocabulary: Vocabulary, *given: Any):
        """Begins a text whose calls have a format; see `GrowingText` for the rest."""
        super().__init__(vocabulary, *given)
        self._form, self._types, self._text, self._sent = form, types, "", 0
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
            self.calls = self._form.calls(self._text[end:], self._types)
            end = end if self.calls else len(self._text)
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return new
