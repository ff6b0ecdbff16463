"""Options: dataclasses whose fields are declared once for Python, command lines and requests.

    @dataclasses.dataclass(frozen=True)
    class SearchOptions(Options):
        beam_size: int = option(4, "Hypotheses kept for each text.", minimum=1)

`SearchOptions(beam_size=0)` raises an `OptionError`. tools/flags makes a flag of each option, and
wings/serving/bodies.py a field of a request's body.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.constraints import Constraint
from lingvo_gshard.core.errors import UserError

_Value = TypeVar("_Value")
_KEY = "option"
_DOC_LINE = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="    ")


class OptionError(UserError):
    """A wrong value of an option.

    Attributes:
      expected: the values that are accepted, as a sentence without a subject.
    """

    def __init__(self, name: str, value: Any, expected: str, message: str = ""):
        """Makes the error of an option, or of one element of a tuple, which is named "stop[1]"."""
        super().__init__(message or f"`{name}={value}`: {expected}")
        self.value, self.expected = value, expected


@dataclasses.dataclass(frozen=True)
class Option:
    """The declaration of one option.

    Attributes:
      name: the option's name in Python, as a flag, and as a field of a request's body.
      kind: bool, int, float or str: the type of a value, or of the elements of a tuple.
      default: the value unless another one is given. None also means that there is no value.
      constraint: the accepted numbers, for a value or for each element of a tuple.
      choices: the accepted texts; empty accepts all.
    """

    name: str
    kind: type
    is_tuple: bool
    default: Any
    help: str
    constraint: Constraint
    choices: tuple[str, ...]

    def checked(self, value: Any) -> Any:
        """Returns a value in the option's type: 1.0 for 1, and a tuple for a list.

        Raises:
          OptionError: the value has another type, is out of range, or is none of the choices.
        """
        if value is None and self.default is None:
            return None
        if not self.is_tuple:
            return self._checked(value, self.name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError(self.name, value, "a list was expected")
        return tuple(
            self._checked(each, f"{self.name}[{index}]") for index, each in enumerate(value)
        )

    def _checked(self, value: Any, name: str) -> Any:
        try:
            converted = self.constraint.converted(value, self.kind())
        except UserError as error:
            expected = str(error).removeprefix("expected ")
            raise OptionError(name, value, f"{expected} was expected") from None
        if self.choices and converted not in self.choices:
            expected = f"{' or '.join(self.choices)} was expected"
            message = f"`{name}={value}` is unknown. {names.nearest(value, self.choices)}"
            raise OptionError(name, value, expected, message)
        return converted


class Options:
    """Base of dataclasses whose fields are made by `option`. Refuses wrong values of options.

    Fields that are not made by `option` are neither checked nor flags or fields of a body. The
    docstring of a subclass gets the options as its attributes.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        lines = [
            _DOC_LINE.fill(f"{name}: {field.metadata[_KEY]['help']}")
            for name, field in vars(cls).items()
            if isinstance(field, dataclasses.Field) and _KEY in field.metadata
        ]
        about = inspect.cleandoc(cls.__doc__ or "")
        heading = [] if "\nAttributes:\n" in about else ["", "Attributes:"]
        cls.__doc__ = "\n".join([about, *heading, *lines])

    def __post_init__(self) -> None:
        for name, each in declared(type(self)).items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))


def option(
    default: _Value,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> _Value:
    """Declares a field of a subclass of `Options`. Its annotation says the type of the values.

    The types are bool, int, float and str, each also with None, and tuples of one of them.

    Args:
      default: the value unless another one is given.
      minimum: smallest number.
      above: accepts only larger numbers than this.
      maximum: largest number.
      below: accepts only smaller numbers than this.
      choices: accepts only these texts.

    Returns:
      A dataclass field, which type checkers take for the default.
    """
    constraint = Constraint(minimum, above, maximum, below)
    metadata = {"help": help, "constraint": constraint, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata={_KEY: metadata})  # type: ignore[return-value]


@functools.cache
def declared(cls: type[Options]) -> Mapping[str, Option]:
    """Returns the options of a class by name, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: Option(
            field.name, *_kind(hints[field.name]), default=field.default, **field.metadata[_KEY]
        )
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata
    }


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the type of an option's values or elements, and whether a value is a tuple."""
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
