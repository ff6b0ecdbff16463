"""TemplateProgram: a chat template in Jinja's sandbox, with limits of time and of size.

A template is a program of strangers. It sees plain data only, and cannot change what it gets.
Whatever it does wrong is a UserError, and so is running for long or writing much. The environment
has the options, filters and functions of transformers (5.24, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from lingvo_gshard.core import UserError

# Seconds that a template may take to compile, or to write a conversation.
SECONDS = 10.0
# Characters of a template, and of what it writes. Published templates have up to 50,000.
_LARGEST_SOURCE, _LONGEST = 1 << 18, 1 << 24
# Larger products and powers of whole numbers are refused, which take long to compute.
_MOST_BITS = 4096
# Filters and methods of texts whose results may be as large as the product of their operands.
_MULTIPLYING = frozenset(
    "batch center expandtabs indent join ljust replace rjust slice tojson zfill".split()
)
_LARGEST_PRODUCT = 1 << 29
# Formats with a large width, or with one that an argument gives.
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{6})")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\d{6}|\{)")
_SHOWN = 200


class TemplateProgram:
    """A compiled template."""

    def __init__(self, source: str, where: str):
        """Compiles a template; UserError, which says where it is from, if it is none."""
        self._where = where
        if len(source) > _LARGEST_SOURCE:
            raise UserError(
                f"{where}: this is no chat template: it has {len(source):,} characters; at most "
                f"{_LARGEST_SOURCE:,} were expected"
            )
        try:
            self._template = _compiled(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where}: this is no chat template: {_said(error)}") from None
        except Exception as error:
            # Python's compiler raises many kinds of errors for deeply nested programs.
            kind = type(error).__name__
            raise UserError(f"{where}: this is no chat template: {kind}: {_said(error)}") from None

    def run(self, variables: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns what the template writes, and the parts of it within `{% generation %}`.

        Raises:
          UserError: the template refuses the values, fails, runs for long or writes much.
        """
        environment: Any = self._template.environment
        state: _State = environment.state
        blocks: list[str] = []
        state.begin()
        try:
            for block in self._template.generate(variables):
                blocks.append(block)
                state.length += len(block)
                state.check()
        except _LimitError as error:
            raise UserError(f"the chat template ({self._where}) {error}") from None
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {_said(error)}") from None
        except Exception as error:
            # A template can raise whatever Python has.
            raise UserError(
                f"the chat template ({self._where}) cannot write the conversation: "
                f"{type(error).__name__}: {_said(error)}"
            ) from None
        finally:
            spans = state.end()
        return "".join(blocks), spans


class _LimitError(Exception):
    """A template does more than it may."""


class _State(threading.local):
    """The limits of one run, and what it has written so far. Threads render at the same time."""

    def __init__(self) -> None:
        self.end()

    def begin(self) -> None:
        """Begins a run."""
        self.end()
        self._deadline = time.monotonic() + SECONDS

    def end(self) -> tuple[tuple[int, int], ...]:
        """Ends a run and returns its spans."""
        found = tuple(getattr(self, "spans", ()))
        self._deadline, self.length = math.inf, 0
        self.spans: list[tuple[int, int]] = []
        return found

    def check(self) -> None:
        """Raises _LimitError if the run takes too long or writes too much."""
        if time.monotonic() > self._deadline:
            raise _LimitError(f"takes longer than {SECONDS:g} s")
        if self.length > _LONGEST:
            raise _LimitError(f"writes more than {_LONGEST:,} characters")


def _filtered(node: Any, name: str, environment: Any) -> jinja2.nodes.Filter:
    """Returns an expression that a filter of ours changes."""
    rest: Any = ([], [], None, None)
    return jinja2.nodes.Filter(node, name, *rest, lineno=node.lineno, environment=environment)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.state = _State()
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}
        self.filters |= {"_in_time": self._in_time, "_joined": _joined}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        # Writes as many words as it is told.
        del self.globals["lipsum"]

    def _generate(self, source: jinja2.nodes.Template, *rest: Any, **values: Any) -> str:
        """Compiles loops so that each round looks at the time, and joins that look at sizes."""
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, "_in_time", self)
        for joined in source.find_all(jinja2.nodes.Concat):
            operands = jinja2.nodes.List(joined.nodes, lineno=joined.lineno)
            joined.nodes = [_filtered(operands, "_joined", self)]
        return super()._generate(source, *rest, **values)

    def _in_time(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.state.check()
            yield value

    # A template may call a function with an argument of the name `self`.
    def call(__self, __context: Any, __callee: Any, *args: Any, **values: Any) -> Any:  # noqa: N805
        __self.state.check()
        text = getattr(__callee, "__self__", None)
        if isinstance(text, str) and __callee.__name__ in _MULTIPLYING:
            _check_product((text, *args, *values.values()))
        return _sized(super().call(__context, __callee, *args, **values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of an operator whose result may be large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            large = {"*": sum(bits), "**": bits[0] * max(right, 1)}.get(operator, 0)
            if large > _MOST_BITS:
                raise _LimitError("computes a number that is too large")
        elif operator == "*":
            # A text or a list, repeated.
            repeated, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(repeated, Sized) and isinstance(times, int):
                _check_size(len(repeated) * times)
        elif operator == "%" and isinstance(left, str):
            _check_format(_WIDE, left)
        return _sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the method `format` of a text without its dangers; None for other values."""
        found = super().wrap_str_format(value)
        if found is not None:
            _check_format(_WIDE_FIELD, value.__self__)
        return found


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that gives no large result."""

    @functools.wraps(function)
    def bounded(*args: Any, **values: Any) -> Any:
        if name in _MULTIPLYING:
            _check_product((*args, *values.values()))
        elif name == "format":
            _check_format(_WIDE, str(args[0]))
        return _sized(function(*args, **values))

    return bounded


def _joined(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_product(values: Iterable[Any]) -> None:
    sizes = (len(each) if isinstance(each, Sized) else each for each in values)
    product = math.prod(max(size, 1) for size in sizes if isinstance(size, int))
    if product > _LARGEST_PRODUCT:
        raise _LimitError("makes a text that is too large")


def _check_size(size: int) -> None:
    if size > _LONGEST:
        raise _LimitError(f"makes a value of more than {_LONGEST:,} elements")


def _check_format(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise _LimitError("formats with a width that is too large")


def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        _check_size(len(value))
    return value


def _said(error: Exception) -> str:
    """Returns an error's message in one line that can be printed."""
    text = " ".join(str(error)[: 2 * _SHOWN].split()) or "no reason is given"
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _Sandbox().from_string(source)


def _raise_exception(message: str) -> None:
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


class _Namespace(jinja2.utils.Namespace):
    """The `namespace` of templates, which takes no names of Python's internals."""

    # `namespace(self=...)` must work, so the instance has no name here.
    def __init__(*args: Any, **values: Any) -> None:  # pyright: ignore
        self, rest = args[0], args[1:]
        given = dict(*rest, **values)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks what the assistant has written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text, environment = caller(), self.environment
        assert isinstance(environment, _Sandbox)
        begin = environment.state.length
        environment.state.spans.append((begin, begin + len(text)))
        return text
