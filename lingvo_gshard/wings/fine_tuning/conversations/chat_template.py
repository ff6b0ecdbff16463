"""ChatTemplate: writes conversations as the text that a published model was trained with.

A template is a program in Jinja, published with the model. It runs in Jinja's sandbox with the
environment of transformers, so that both write equal bytes (see `template_program.py`).
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError, explained, objects
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import (
    SETTINGS,
    SPECIAL_TOKENS,
    read_json,
)

Message = Mapping[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
_OLD_TEMPLATE_FILE = "chat_template.json"
# Levels of lists and objects in a conversation. Schemas of functions have about ten.
_DEEPEST = 100
# Asks whether a content is null, as templates of DeepSeek do for turns that call functions.
_ASKS_NULL = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none")
# Names of a message's reasoning; the first is the one that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    `spans` has begin and end of each part within `{% generation %}`, in characters.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        where: str,
        date: datetime.datetime | None = None,
    ):
        """Compiles the program.

        Args:
          tokens: name of a special token -> its text.
          where: where the program is from, for messages.
          date: the time that the program is told; None for the present.

        Raises:
          UserError: it is no program in Jinja.
        """
        # Imported here: most runs have no templates.
        from lingvo_gshard.wings.fine_tuning.conversations.template_program import TemplateProgram

        self.source, self.tokens, self.where, self.date = source, dict(tokens), where, date
        self._program = TemplateProgram(source, where)

    def at(self, date: str) -> ChatTemplate:
        """Returns the template with a fixed date such as "2025-01-01"; with "", the present."""
        try:
            found = datetime.datetime.fromisoformat(date) if date else None
        except ValueError:
            raise UserError(
                f"input.template_date is {date!r}; a date such as 2025-01-01 was expected"
            ) from None
        return ChatTemplate(self.source, self.tokens, self.where, found)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Returns the text of a conversation.

        Args:
          messages: the turns, such as {"role": "user", "content": "Hello"}.
          tools: JSON schemas of functions that the model may call; None for none.
          add_generation_prompt: whether the text ends with the beginning of an answer.
          values: further values that the template reads, such as `enable_thinking`.

        Raises:
          UserError: the template refuses the conversation, cannot write it, runs for long or
            writes much. Or a value is nested deeply.
        """
        variables = {**self.tokens, **plain(values or {})}
        prepared = [_prepared(plain(message)) for message in messages]
        variables |= {
            "messages": prepared,
            "tools": None if tools is None else plain(list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.date:
            variables["strftime_now"] = self.date.strftime
        try:
            return Rendered(*self._program.run(variables))
        except UserError:
            # Some templates ask whether the content of a turn with calls is null, and fail if it is
            # missing.
            silent = [m for m in prepared if m.get("tool_calls") and "content" not in m]
            if not silent or not _ASKS_NULL.search(self.source):
                raise
            for message in silent:
                message["content"] = None
            return Rendered(*self._program.run(variables))

    @classmethod
    def of_model(cls, directory: pathlib.Path, name: str = "default") -> ChatTemplate | None:
        """Returns the template of a published model; None if it has none.

        A name chooses one where tokenizer_config.json has several.

        Raises:
          UserError: a file is damaged, or the model has templates but none of this name.
        """
        path = directory / TEMPLATE_FILE
        if path.is_file():
            return cls(read_template(path, str(path)), tokens_of(directory), str(path))
        for path in (directory / _OLD_TEMPLATE_FILE, directory / SETTINGS):
            found = read_json(path).get("chat_template")
            if found is not None:
                where = f"chat_template in {path}"
                return cls(_chosen(found, name, where), tokens_of(directory), where)
        return None


def read_template(path: pathlib.Path, where: str) -> str:
    """Returns the program in a file; UserError if it cannot be read."""
    with explained(f"{where}: this is no chat template", OSError, UserError):
        return objects.read_text(path)


def _chosen(found: Any, name: str, where: str) -> str:
    """Returns the template of a name in a setting that has one or several; UserError if none."""
    if isinstance(found, str):
        return found
    try:
        named = {each["name"]: each["template"] for each in found}
        if not all(isinstance(text, str) for text in (*named, *named.values())):
            raise TypeError
    except (TypeError, KeyError, IndexError):
        raise UserError(
            f"{where} is of the type {type(found).__name__}; a text was expected, or a list of "
            "objects with 'name' and 'template'"
        ) from None
    if name not in named:
        raise UserError(f"{where}: there is no template {name!r}, but {', '.join(sorted(named))}")
    return named[name]


def tokens_of(directory: pathlib.Path) -> dict[str, str]:
    """Returns the special tokens of a published model by name, such as "eos_token".

    tokenizer_config.json comes before special_tokens_map.json.
    """
    found: dict[str, str] = {}
    for file in (SPECIAL_TOKENS, SETTINGS):
        values = read_json(directory / file)
        for name in (key for key in values if key.endswith("_token")):
            token = values[name]
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[name] = token
    return found


def plain(value: Any, depth: int = 0) -> Any:
    """Returns JSON values; UserError if nested deeply. Objects of other types become names."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == _DEEPEST:
        raise UserError(
            f"the conversation has values that are nested deeper than {_DEEPEST} levels"
        )
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth + 1) for each in value]
    return f"<{type(value).__name__}>"


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without nulls, its reasoning under the names that templates read.

    Templates write "None" for a null, and do well with a missing key.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
