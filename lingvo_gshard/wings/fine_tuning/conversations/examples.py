"""Example: a conversation or a pair of prompt and completion, as a line of JSON has it.

Datasets on the Hugging Face Hub and OpenAI's fine-tuning files have the same fields:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"prompt": "2 + 2 =", "completion": " 4"}
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}

A pair for preferences has `chosen` and `rejected` in place of `completion`, and may leave out the
prompt if both are conversations that begin with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError, explained
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import Message, plain

ASSISTANT = "assistant"
# Fields that hold conversations: the first is the usual one.
MESSAGES = ("messages", "conversation")
PROMPT, COMPLETION, CHOSEN, REJECTED, TOOLS = "prompt", "completion", "chosen", "rejected", "tools"
_VALUES = "chat_template_kwargs"
FIELDS = (*MESSAGES, PROMPT, COMPLETION, CHOSEN, REJECTED, TOOLS, _VALUES)


@dataclasses.dataclass(frozen=True)
class Example:
    """A text whose end or whose answers are learned.

    Attributes:
      prompt: the turns or the text before the completion.
      completion: the turns or the text that follow. A whole conversation has no prompt.
      tools: JSON schemas of functions that the conversation may call; None for none.
      values: further values for the template.
    """

    prompt: tuple[Message, ...] | str
    completion: tuple[Message, ...] | str
    tools: tuple[Mapping[str, Any], ...] | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """Whether the example is plain text, which needs no template."""
        return isinstance(self.prompt, str)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns of a conversation."""
        assert not isinstance(self.prompt, str) and not isinstance(self.completion, str)
        return (*self.prompt, *self.completion)

    def identity(self) -> str:
        """Returns a text that examples share if and only if they are equal."""
        return json.dumps(dataclasses.astuple(self), sort_keys=True, ensure_ascii=False)


def example_of(fields: Mapping[str, Any]) -> Example:
    """Returns the example in the fields of a line. Raises UserError if one is missing or wrong."""
    plain(fields)
    found = [name for name in MESSAGES if fields.get(name) is not None]
    if found:
        turns = _turns(found[0], fields[found[0]])
        if not any(turn["role"] == ASSISTANT for turn in turns):
            raise UserError(f"{found[0]!r} has no turn of the role {ASSISTANT!r} to learn")
        return _with_rest((), turns, fields)
    if fields.get(PROMPT) is None or fields.get(COMPLETION) is None:
        raise UserError(
            f"no {MESSAGES[0]!r}, and no {PROMPT!r} with {COMPLETION!r}: there are "
            f"{', '.join(map(repr, fields)) or 'no fields'}"
        )
    prompt, completion = _same_kind(fields, COMPLETION)
    return _with_rest(prompt, completion, fields)


def pair_of(fields: Mapping[str, Any]) -> tuple[Example, Example]:
    """Returns a line's chosen and rejected example. Raises UserError if both are equal or wrong."""
    plain(fields)
    for name in (CHOSEN, REJECTED):
        if fields.get(name) is None:
            raise UserError(f"no {name!r}: there are {', '.join(map(repr, fields)) or 'no fields'}")
    if fields.get(PROMPT) is None:
        pair = _without_prompt(fields)
    else:
        pair = tuple(_with_rest(*_same_kind(fields, name), fields) for name in (CHOSEN, REJECTED))
    if pair[0].completion == pair[1].completion:
        raise UserError(f"{CHOSEN!r} and {REJECTED!r} are equal")
    return pair[0], pair[1]


def _without_prompt(fields: Mapping[str, Any]) -> tuple[Example, ...]:
    """Returns the examples of two conversations, whose common turns are the prompt."""
    chosen, rejected = (_turns(name, fields[name]) for name in (CHOSEN, REJECTED))
    shortest = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if not common:
        raise UserError(
            f"{CHOSEN!r} and {REJECTED!r} do not begin with the same turn, and there is no "
            f"{PROMPT!r}"
        )
    return tuple(_with_rest(turns[:common], turns[common:], fields) for turns in (chosen, rejected))


def _same_kind(fields: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Returns prompt and completion: both texts, or both turns."""
    prompt, completion = fields[PROMPT], fields[name]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise UserError(f"{name!r} is empty")
        return prompt, completion
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(f"one of {PROMPT!r} and {name!r} is a text, and the other is not")
    return _turns(PROMPT, prompt), _turns(name, completion)


def _turns(name: str, value: Any) -> tuple[Message, ...]:
    """Returns the turns in a field; UserError if it is no list of turns."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f"{name!r} is {_shown(value)}; a list of turns was expected")
    for number, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise UserError(
                f"{name}[{number}] is {_shown(turn)}; an object with 'role' and 'content' was "
                "expected"
            )
        _check_turn(f"{name}[{number}]", turn)
    return tuple(value)


def _check_turn(name: str, turn: Message) -> None:
    """Raises UserError if a field of a turn is of a kind that no template can mean."""
    weight, calls, content = (turn.get(key) for key in ("weight", "tool_calls", "content"))
    if weight not in (None, 0, 1):
        raise UserError(f"{name}.weight is {_shown(weight)}; 0 or 1 was expected")
    if not (calls is None or _is_list_of_objects(calls)):
        raise UserError(f"{name}.tool_calls is {_shown(calls)}; a list of objects was expected")
    if not (content is None or isinstance(content, (str, list, Mapping))):
        raise UserError(f"{name}.content is {_shown(content)}; a text was expected")


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _with_rest(
    prompt: tuple[Message, ...] | str,
    completion: tuple[Message, ...] | str,
    fields: Mapping[str, Any],
) -> Example:
    tools, values = fields.get(TOOLS) or None, fields.get(_VALUES)
    if isinstance(tools, str):
        # Files that hold one type in a column have the tools as JSON.
        with explained(
            f"{TOOLS!r} is {_shown(tools)}, which is no JSON", ValueError, RecursionError
        ):
            tools = json.loads(tools)
            plain(tools)
    if not (tools is None or _is_list_of_objects(tools)):
        raise UserError(f"{TOOLS!r} is {_shown(tools)}; a list of objects was expected")
    if not (values is None or isinstance(values, Mapping)):
        raise UserError(f"{_VALUES!r} is {_shown(values)}; an object was expected")
    return Example(prompt, completion, tuple(tools) if tools else None, dict(values or {}))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
