"""Bodies of requests: reads JSON into typed objects, and says in a sentence what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from lingvo_gshard.core import Option, OptionError, UserError, declared, names
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.serving.errors import UNPROCESSABLE, ClientGoneError, RequestError

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
# Larger numbers would overflow in a decoding step.
Number: TypeAlias = Annotated[float, Meta(ge=-1e6, le=1e6)]
Texts: TypeAlias = str | list[str]
Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
Stops: TypeAlias = Stop | list[Stop]

_Body = TypeVar("_Body", bound=msgspec.Struct)
_SearchBody = TypeVar("_SearchBody", bound="SearchBody")
_LONGEST_SHOWN = 60
_DIGITS = 20
# Lists and objects within each other. What reads a body may call itself for each of them.
_DEEPEST = 64
_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class SearchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request with options for choosing tokens; `with_options` adds a field for each option.

    Attributes:
      timeout: seconds until the server gives the request up; None for the server's limit.
      routing: whether the answer says which experts each token is routed to.
    """

    USUAL: ClassVar[DecodingOptions]

    timeout: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    routing: bool = False

    def options(self) -> DecodingOptions:
        """Returns the options that the fields say; RequestError if one is wrong."""
        kind = type(self.USUAL)
        values = {name: getattr(self, name) for name in declared(kind)}
        for name, option in declared(kind).items():
            if option.is_tuple:
                values[name] = names.listed(values[name])
        try:
            return kind(**values)
        except UserError as error:
            raise options_error(error, UNPROCESSABLE) from None


def with_options(usual: DecodingOptions) -> Callable[[type[_SearchBody]], type[_SearchBody]]:
    """Returns a decorator of a body that adds a field for each option, with its usual value."""
    fields = [
        (name, _field_type(option), getattr(usual, name))
        for name, option in declared(type(usual)).items()
    ]

    def add_fields(body: type[_SearchBody]) -> type[_SearchBody]:
        made: Any = msgspec.defstruct(
            body.__name__,
            fields,
            bases=(body,),
            module=body.__module__,
            namespace={"USUAL": usual, "__doc__": body.__doc__},
            kw_only=True,
            forbid_unknown_fields=True,
        )
        return made

    return add_fields


def options_error(error: UserError, status: int) -> RequestError:
    """Returns the error of a request whose options are wrong or do not go together."""
    if not isinstance(error, OptionError):
        return RequestError(status, str(error))
    given = json.dumps(error.value, ensure_ascii=False)
    return RequestError(status, f"{error.option} is {given}; {error.expected}", error.option)


def _field_type(option: Option) -> Any:
    """Returns the type of an option's JSON value. Options check ranges of numbers themselves."""
    types = {bool: bool, int: int, float: Number, str: str}
    if not option.is_tuple:
        return types[option.kind] if option.default is not None else types[option.kind] | None
    return Stops if option.kind is str else list[types[option.kind]]


async def read_bytes(request: Request, most: int, seconds: float) -> bytes:
    """Returns the body of a request.

    Raises:
      RequestError: 413 if the body is larger than `most`, 408 if the body takes longer.
      ClientGoneError: the client has left meanwhile.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _all_bytes(request, most)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise RequestError(
            408, f"the body took longer than {seconds:g} s", headers={"Connection": "close"}
        ) from None


async def _all_bytes(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "")
    # A number of more digits is no number to Python.
    if told.isdecimal() and (len(told) > _DIGITS or int(told) > most):
        raise _too_large(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def parse(
    body: bytes,
    kind: type[_Body],
    status: int = UNPROCESSABLE,
    published: PublishedSettings | None = None,
) -> _Body:
    """Returns a JSON body as an object.

    Args:
      status: the HTTP status of a body that is JSON but not such an object.
      published: fields of the object that the body need not give.

    Raises:
      RequestError: it is not JSON, or a field is missing, unknown or wrong.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        said = str(error).removeprefix("JSON is malformed: ")
        raise RequestError(400, f"the body is not valid JSON: {said}") from None
    # Most bodies are too short for that.
    if body.count(b"[") + body.count(b"{") > _DEEPEST and _is_deep(value):
        raise _too_deep()
    try:
        given = msgspec.convert(value, kind)
        if published is None or not published.fields:
            return given
        # Checked first: a published value must not make a wrong body right.
        return msgspec.convert(published.values(value), kind)
    except msgspec.ValidationError as error:
        field, message, code = _sentence(str(error), value, kind)
        raise RequestError(status, message, field, code) from None


def _is_deep(value: Any) -> bool:
    """Returns whether a decoded body has lists and objects within more than _DEEPEST others."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for part in parts for one in part if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


def _too_deep() -> RequestError:
    return RequestError(
        400, f"the body is nested too deeply: at most {_DEEPEST} lists or objects were expected"
    )


def _too_large(most: int) -> RequestError:
    return RequestError(413, f"the body has more than {most:,} bytes, the limit of this server")


def _sentence(said: str, value: Any, kind: type[msgspec.Struct]) -> tuple[str | None, str, str]:
    """Returns the field that a message of msgspec is about, a sentence, and OpenAI's code."""
    about = re.fullmatch(r"Object (missing required|contains unknown) field `(.*?)`.*", said)
    if about:
        name, known = about[2], kind.__struct_fields__
        if about[1] == "missing required":
            return name, f"{name} is missing", "missing_required_parameter"
        hint = names.nearest(name, known)
        return name, f"{name} is not a field of this request. {hint}", "unknown_parameter"
    expectation, _, place = said.partition(" - at `$")
    field = place.removesuffix("`").removeprefix(".") or None
    expected = expectation.removeprefix("Expected ").partition(", got ")[0]
    expected = re.sub(r"`(.*?)`", lambda found: _in_words(found[1]), expected)
    given = json.dumps(_at(value, field), ensure_ascii=False)
    if len(given) > _LONGEST_SHOWN:
        given = given[:_LONGEST_SHOWN] + "..."
    code = "invalid_type" if ", got " in said else "invalid_value"
    return field, f"{field or 'the body'} is {given}; {expected} was expected", code


def _in_words(types: str) -> str:
    return " or ".join(_NOUNS.get(name, name) for name in types.split(" | "))


def _at(value: Any, field: str | None) -> Any:
    """Returns the part of a decoded body at a path such as "stop[1]"."""
    for step in re.findall(r"\w+", field or ""):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value
