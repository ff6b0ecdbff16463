"""Runs commands that have subcommands, each a module with flags and help of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from lingvo_gshard.core import UserError
from lingvo_gshard.core.config import names
from lingvo_gshard.tools.console import output, startup


def run(argv: list[str], about: str | None, modules: Mapping[str, str], *rest: object) -> int:
    """Runs the subcommand that the first argument without a dash names.

    Args:
      argv: the program's name and the arguments.
      about: the command's documentation, which --help prints.
      modules: the module of each subcommand. Its docstring is the help, `define_flags()` returns
        the flags, among them --json, and `run(values, console, *rest)` returns the exit code.
      *rest: further arguments of `run`.

    Returns:
      The exit code.

    Raises:
      UserError: the subcommand is missing or unknown, or a mistake of its flags.
    """
    subcommand = next((a for a in argv[1:] if not a.startswith("-")), None)
    if subcommand is None and any(argument in startup.HELP for argument in argv[1:]):
        print((about or "").strip())
        return 0
    if subcommand is None or subcommand not in modules:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        raise UserError(f"the subcommand {given}. {names.nearest(subcommand or '', modules)}")
    module = importlib.import_module(modules[subcommand])
    values = module.define_flags()
    place = argv.index(subcommand)
    startup.parse_flags(values, [*argv[:place], *argv[place + 1 :]], module.__doc__)
    output.check_writable(values, "json")
    return module.run(values, output.make_console(values.json), *rest)
