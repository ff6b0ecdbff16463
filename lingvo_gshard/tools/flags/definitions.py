"""Kinds of flags, with help, default and bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from absl import flags

from lingvo_gshard.core import UserError

# Defines a flag of a name.
Definition = Callable[[str, flags.FlagValues], object]


# Flags by name. The help shows them in this order. A text alone is the help of a `string` without a
# default.
Flags = dict[str, Definition | str]


def maker(**definitions: Definition | str) -> Callable[[], flags.FlagValues]:
    """Returns what makes a command's flags."""
    return functools.partial(make_flags, **definitions)


def make_flags(**definitions: Definition | str) -> flags.FlagValues:
    """Returns a command's flags."""
    values = flags.FlagValues()
    define(values, **definitions)
    return values


def define(values: flags.FlagValues, **definitions: Definition | str) -> None:
    """Defines further flags of a command."""
    for name, given in definitions.items():
        definition = string(given) if isinstance(given, str) else given
        definition(name, values)


class TextParser(flags.ArgumentParser):
    """Takes any text. Whoever reads the flag refuses texts that are none of the `choices`."""

    def __init__(self, choices: tuple[str, ...]):
        super().__init__()
        self.choices = choices


def string(help: str, default: str | None = None, choices: Iterable[str] = ()) -> Definition:
    """Declares a flag that takes a text. Completion and the reference show its `choices`."""
    parser, writer = TextParser(tuple(choices)), flags.ArgumentSerializer()
    return lambda name, values: flags.DEFINE(parser, name, default, help, values, writer)


def choices_of(flag: flags.Flag) -> tuple[str, ...]:
    """Returns the texts that a flag accepts; empty if it accepts others, too, or is no text."""
    return flag.parser.choices if isinstance(flag.parser, TextParser) else ()


def switch(help: str, default: bool = False) -> Definition:
    """Declares a flag that is on or off: --name or --noname."""
    return lambda name, values: flags.DEFINE_boolean(name, default, help, flag_values=values)


def integer(
    help: str, default: int | None = None, least: int | None = None, most: int | None = None
) -> Definition:
    """Declares a flag that takes a whole number."""
    return lambda name, values: flags.DEFINE_integer(
        name, default, help, least, most, flag_values=values
    )


def decimal(
    help: str, default: float | None = None, least: float | None = None, most: float | None = None
) -> Definition:
    """Declares a flag that takes a number."""
    return lambda name, values: flags.DEFINE_float(
        name, default, help, least, most, flag_values=values
    )


def comma_list(help: str, default: list[str] | None = None) -> Definition:
    """Declares a flag that takes texts with commas between them."""
    return lambda name, values: flags.DEFINE_list(name, default, help, flag_values=values)


def repeated(
    help: str, default: list[str] | None = None, choices: Iterable[str] = ()
) -> Definition:
    """Declares a flag that may be repeated, each time with a text."""
    parser, writer = TextParser(tuple(choices)), flags.ArgumentSerializer()
    return lambda name, values: flags.DEFINE_multi(parser, writer, name, default, help, values)


def refuse(values: flags.FlagValues, names: Iterable[str], why: str) -> None:
    """Raises UserError for the first of some flags that is given. A switch may be at its default.

    Args:
      why: what follows the flag in the message, such as "does not apply to --budget".
    """
    for name in names:
        flag = values[name]
        if flag.present and not (flag.boolean and flag.value == flag.default):
            # One of a flag that was repeated is enough.
            raise UserError(f"{flag.serialize().splitlines()[0]} {why}")
