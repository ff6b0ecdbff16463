"""Runs commands that have subcommands, each a module with flags and help of its own."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping, Sequence

from lingvo_gshard.core import UserError, names
from lingvo_gshard.tools.console import output, startup


def run(
    argv: list[str], about: str | None, modules: Mapping[str, str], command: str, *rest: object
) -> int:
    """Runs the subcommand that the first argument without a dash names. Returns the exit code.

    Args:
      about: the command's documentation, or its first sentence, which --help prints.
      modules: the module of each subcommand. Its docstring is the help, `define_flags()` returns
        the flags, among them --json, and `run(values, console, *rest)` returns the exit code. If it
        has an OPERAND, such as ("file", "how to make one"), `run` gets this argument before `rest`.
      command: the name of the command's module.
      *rest: further arguments of `run`.

    Raises:
      UserError: the subcommand is missing or unknown, or a mistake of its flags.
    """
    subcommand = next((a for a in argv[1:] if not a.startswith("-")), None)
    if subcommand is None and any(argument in startup.HELP for argument in argv[1:]):
        print(startup.refilled(startup.help_page(about, command)))
        return 0
    if subcommand is None or subcommand not in modules:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        raise UserError(f"the subcommand {given}. {names.nearest(subcommand or '', modules)}")
    module = importlib.import_module(modules[subcommand])
    values = module.define_flags()
    arguments = list(argv)
    arguments.remove(subcommand)
    operands = []
    if operand := getattr(module, "OPERAND", None):
        operands = [a for a in arguments[1:] if not a.startswith("-")]
        arguments = [a for a in arguments if a not in operands]
    try:
        startup.parse_flags(values, arguments, module.__doc__, module.__name__)
    except UserError as error:
        _check_owner(str(error), arguments, subcommand, modules)
        raise
    if operand and len(operands) != 1:
        what, advice = operand
        given = f"{len(operands)} were given"
        raise UserError(f"{subcommand} takes one {what}, {given}; {advice}")
    output.check_writable(values, "json")
    return module.run(values, output.make_console(values.json), *operands, *rest)


def _check_owner(
    problem: str, arguments: Sequence[str], subcommand: str, modules: Mapping[str, str]
) -> None:
    """Raises UserError if an unknown flag is one of another subcommand."""
    unknown = re.match(r"Unknown command line flag '(\w+)'", problem)
    if not unknown:
        return
    for name, path in modules.items():
        # Another subcommand may need libraries that are not there.
        with contextlib.suppress(ImportError):
            if unknown[1] in importlib.import_module(path).define_flags():
                flag = next(a for a in arguments if re.match(rf"--?(no)?{unknown[1]}\b", a))
                raise UserError(f"{flag} applies to `{name}`, not to `{subcommand}`")
