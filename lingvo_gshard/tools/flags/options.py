"""Flags made of declared options, and the options that the flags give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from absl import flags

from lingvo_gshard.core import Option, Options, UserError, declared
from lingvo_gshard.tools.flags import definitions

_Options = TypeVar("_Options", bound=Options)


def option_flags(
    options: Options | type[Options],
    names: Iterable[str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> definitions.Flags:
    """Returns a flag for each option, with its name, type, bounds and description.

    A tuple of numbers is written with commas. The flag of a tuple of texts may be repeated, since a
    text may have commas.

    Args:
      options: the defaults, or the class of options: its flags have no defaults, so that the
        command decides what an option is that is not given.
      names: the options; None: all.
      notes: further sentences of descriptions, by option.
    """
    cls = options if isinstance(options, type) else type(options)
    found: definitions.Flags = {}
    for name in declared(cls) if names is None else names:
        each = declared(cls)[name]
        default = None if isinstance(options, type) else getattr(options, name)
        help = " ".join(filter(None, (each.help, (notes or {}).get(name))))
        found[name] = _definition(each, default, help)
    return found


def given_options(
    values: flags.FlagValues, cls: type[Options], names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Returns by name the options whose flags the user has given; by default, all of those."""
    wanted = declared(cls) if names is None else names
    return {
        name: _value(values, declared(cls)[name])
        for name in wanted
        if name in values and values[name].present
    }


def read_options(values: flags.FlagValues, cls: type[_Options], **fields: Any) -> _Options:
    """Returns the options that the flags give. Options without a flag have their own default.

    `fields` are values of other fields, or of options in place of their flags.
    """
    found = {name: _value(values, each) for name, each in declared(cls).items() if name in values}
    return cls(**found | fields)


def _definition(option: Option, default: Any, help: str) -> definitions.Definition:
    accepted = option.constraint
    least, most = accepted.minimum, accepted.maximum
    if accepted.above is not None or accepted.below is not None:
        # absl has no open bounds. The options check their values themselves.
        least = most = None
    if option.is_tuple and option.kind is str:
        return definitions.repeated(help, list(default or ()), filter(None, option.choices))
    if option.is_tuple:
        return definitions.comma_list(
            f"{help} Separated by commas.", [str(each) for each in default or ()]
        )
    if option.kind is bool:
        return definitions.switch(help, default)
    if option.kind is int:
        return definitions.integer(help, default, _int(least), _int(most))
    if option.kind is float:
        return definitions.decimal(help, default, least, most)
    return definitions.string(help, default, filter(None, option.choices))


def _int(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def _value(values: flags.FlagValues, option: Option) -> Any:
    value = values[option.name].value
    if not option.is_tuple or option.kind is str or value is None:
        return value
    return tuple(_number(option, text) for text in value)


def _number(option: Option, text: str) -> Any:
    try:
        return option.kind(text)
    except ValueError:
        expected = option.constraint.describe(option.kind())
        raise UserError(f"`{option.name}`: {text!r}; {expected} was expected") from None


def spell_options(options: Options) -> list[str]:
    """Returns the flags that give options, without those that have their defaults."""
    flags_: list[str] = []
    for name, each in declared(type(options)).items():
        value = getattr(options, name)
        if value == each.default:
            continue
        if each.is_tuple and each.kind is str:
            flags_ += [f"--{name}={one}" for one in value]
        elif each.is_tuple:
            flags_.append(f"--{name}={','.join(map(str, value))}")
        else:
            flags_.append(f"--{name}={str(value).lower() if each.kind is bool else value}")
    return flags_


DRY_RUN = definitions.switch("Shows what would be written and started.")
