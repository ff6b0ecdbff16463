"""Flags made of declared options, and the options that the flags give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.options import Option, Options, declared

_Options = TypeVar("_Options", bound=Options)


def define_option_flags(
    values: flags.FlagValues,
    options: Options | type[Options],
    names: Iterable[str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Defines a flag for each option, with its name, type, bounds and description.

    A tuple of numbers is written with commas. The flag of a tuple of texts may be repeated, since a
    text may have commas.

    Args:
      values: the command's flags.
      options: the defaults, or the class of options: its flags have no defaults, so that the
        command decides what an option is that is not given.
      names: the options to define; None: all.
      notes: further sentences of descriptions, by option.
    """
    cls = options if isinstance(options, type) else type(options)
    for name in declared(cls) if names is None else names:
        each = declared(cls)[name]
        default = None if isinstance(options, type) else getattr(options, name)
        help = " ".join(filter(None, (each.help, (notes or {}).get(name))))
        _define(values, each, default, help)


def given_options(
    values: flags.FlagValues, cls: type[Options], names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Returns the options whose flags the user has given, by name.

    Args:
      values: the command's flags, which may lack some of the options'.
      cls: the class of options.
      names: the options to return; None: all that have flags.

    Raises:
      UserError: an element of a tuple of numbers is not a number.
    """
    wanted = declared(cls) if names is None else names
    return {
        name: _value(values, declared(cls)[name])
        for name in wanted
        if name in values and values[name].present
    }


def read_options(values: flags.FlagValues, cls: type[_Options], **fields: Any) -> _Options:
    """Returns the options that the flags give. Options without a flag have their own default.

    Args:
      values: the command's flags.
      cls: the class of options.
      **fields: values of other fields, or of options in place of their flags.

    Raises:
      UserError: an option is wrong, or options do not go together.
    """
    found = {name: _value(values, each) for name, each in declared(cls).items() if name in values}
    return cls(**found | fields)


def _define(values: flags.FlagValues, option: Option, default: Any, help: str) -> None:
    name, accepted = option.name, option.constraint
    least, most = accepted.minimum, accepted.maximum
    if accepted.above is not None or accepted.below is not None:
        # absl has no open bounds. The options check their values themselves.
        least = most = None
    if option.is_tuple and option.kind is str:
        flags.DEFINE_multi_string(name, list(default or ()), help, flag_values=values)
    elif option.is_tuple:
        separated = f"{help} Separated by commas."
        flags.DEFINE_list(name, [str(each) for each in default or ()], separated, values)
    elif option.kind is bool:
        flags.DEFINE_boolean(name, default, help, flag_values=values)
    elif option.kind is int:
        flags.DEFINE_integer(name, default, help, _int(least), _int(most), flag_values=values)
    elif option.kind is float:
        flags.DEFINE_float(name, default, help, least, most, flag_values=values)
    else:
        flags.DEFINE_string(name, default, help, flag_values=values)


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


def define_dry_run(values: flags.FlagValues) -> None:
    """Defines --dry_run."""
    flags.DEFINE_boolean(
        "dry_run", False, "Shows what would be written and started.", flag_values=values
    )
