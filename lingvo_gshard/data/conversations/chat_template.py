"""ChatTemplate: writes conversations as the text that a published model was trained with.

A template is a program in Jinja, published with the model. It runs in Jinja's sandbox, sees plain
data only, and cannot change what it gets. The environment has the options, filters and
functions of transformers (5.24, `utils/chat_template_utils.py`): both write equal bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects
from lingvo_gshard.data.vocabularies.published_vocabulary import (
    SETTINGS,
    SPECIAL_TOKENS,
    read_json,
)

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
_OLD_TEMPLATE_FILE = "chat_template.json"
# Names of the special tokens that templates may use, as tokenizer_config.json has them.
_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Names of a message's reasoning; the first is the one that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: the text.
      spans: begin and end of each part of the text within `{% generation %}`, in characters.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A template with the special tokens that it may name.

    Attributes:
      source: the program.
      tokens: name of a special token, such as "eos_token" -> its text.
      where: where the program is from, for messages.
      date: the time that the program is told; None for the present.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        where: str,
        date: datetime.datetime | None = None,
    ):
        """Compiles the program.

        Args:
          source: the program.
          tokens: name of a special token -> its text.
          where: where the program is from, for messages.
          date: the time that the program is told; None for the present.

        Raises:
          UserError: it is no program in Jinja.
        """
        import jinja2

        self.source, self.tokens, self.where, self.date = source, dict(tokens), where, date
        try:
            self._compiled = _compiled(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where}: this is no chat template: {error}") from None

    def at(self, date: str) -> ChatTemplate:
        """Returns the template with a fixed date.

        Args:
          date: such as "2025-01-01"; "" for the present.

        Raises:
          UserError: it is no date.
        """
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
          UserError: the template refuses the conversation, or cannot write it.
        """
        import jinja2

        variables = {**self.tokens, **_plain(values or {})}
        variables |= {
            "messages": [_with_reasoning(_plain(message)) for message in messages],
            "tools": None if tools is None else _plain(list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.date:
            variables["strftime_now"] = self.date.strftime
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        environment: Any = self._compiled.environment
        try:
            with environment.tracking(blocks, spans):
                for block in self._compiled.generate(variables):
                    blocks.append(block)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise UserError(
                f"the chat template ({self.where}) cannot write the conversation: "
                f"{type(error).__name__}: {error}"
            ) from None
        return Rendered("".join(blocks), tuple(spans))

    @classmethod
    def of_model(cls, directory: pathlib.Path, name: str = "default") -> ChatTemplate | None:
        """Returns the template of a published model; None if it has none.

        Args:
          directory: the model's files.
          name: which template, where tokenizer_config.json has several.

        Raises:
          UserError: a file is damaged, or the model has templates but none of this name.
        """
        settings = read_json(directory / SETTINGS)
        path = directory / TEMPLATE_FILE
        if path.is_file():
            return cls(objects.read_text(path), tokens_of(directory), str(path))
        for path in (directory / _OLD_TEMPLATE_FILE, directory / SETTINGS):
            found = (read_json(path) if path.name != SETTINGS else settings).get("chat_template")
            if found is None:
                continue
            if not isinstance(found, str):
                named = {each["name"]: each["template"] for each in found}
                if name not in named:
                    raise UserError(
                        f"{path}: there is no template {name!r}, but {', '.join(sorted(named))}"
                    )
                found = named[name]
            return cls(found, tokens_of(directory), f"chat_template in {path}")
        return None


def tokens_of(directory: pathlib.Path) -> dict[str, str]:
    """Returns the special tokens of a published model by name, such as "eos_token".

    tokenizer_config.json comes before special_tokens_map.json.

    Raises:
      UserError: a file is damaged.
    """
    found: dict[str, str] = {}
    for file in (SPECIAL_TOKENS, SETTINGS):
        values = read_json(directory / file)
        for name in (key for key in values if key in _TOKENS or key.endswith("_token")):
            token = values[name]
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[name] = token
    return found


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a template in a sandbox, with the options that transformers has."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _namespace()
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The filter of Jinja would write <, > and & as escapes.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Dict:
    """`dict` of Python with no way from a template to the class itself."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@functools.cache
def _namespace() -> type:
    """Returns the `namespace` of templates, which takes no names of Python's internals."""
    import jinja2
    import jinja2.utils

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")

    class Namespace(jinja2.utils.Namespace):
        # `namespace(self=...)` must work, so the instance has no name here.
        def __init__(*args: Any, **values: Any) -> None:  # pyright: ignore
            self, rest = args[0], args[1:]
            given = dict(*rest, **values)
            for name in given:
                check(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return Namespace


@functools.cache
def _generation_tag() -> Any:
    """Returns the extension for `{% generation %}`, which marks what the assistant has written."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def __init__(self, environment: jinja2.Environment):
            super().__init__(environment)
            environment.extend(tracking=self.tracking)
            # Threads render at the same time.
            self._tracked = threading.local()

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text = caller()
            tracked = getattr(self._tracked, "lists", None)
            if tracked is not None:
                blocks, spans = tracked
                begin = sum(map(len, blocks))
                spans.append((begin, begin + len(text)))
            return text

        @contextlib.contextmanager
        def tracking(self, blocks: list[str], spans: list[tuple[int, int]]) -> Iterator[None]:
            """Adds the spans of what is rendered meanwhile to a list."""
            self._tracked.lists = blocks, spans
            try:
                yield
            finally:
                self._tracked.lists = None

    return Generation


def _plain(value: Any) -> Any:
    """Returns JSON values without null in messages; an object of another type becomes its name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without nulls, and with its reasoning under the names that templates read.

    Templates write "None" for a null, and do well with a missing key.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
