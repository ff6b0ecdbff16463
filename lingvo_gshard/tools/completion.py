"""Prints a script that completes the commands' flags and their values in a shell."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from absl import flags

from lingvo_gshard.api.experiments import experiments
from lingvo_gshard.core import names
from lingvo_gshard.sharding import strategies
from lingvo_gshard.tools.console import Command, Flag, launcher, shells, startup
from lingvo_gshard.tools.flags.definitions import choices_of, maker
from lingvo_gshard.wings.planning.machines import topologies

SUBCOMMANDS = tuple(shells.SCRIPTS)
_NUMBERS = ("int", "float")

define_flags = maker()


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    shell = next((word for word in argv[1:] if not word.startswith("-")), "")
    startup.parse_flags(define_flags(), [word for word in argv if word != shell], __doc__, __name__)
    given = f"the shell {shell!r} is unknown" if shell else "the shell is missing"
    names.check(shell, SUBCOMMANDS, given)
    print(shells.SCRIPTS[shell](commands()), end="")
    return 0


def commands() -> list[Command]:
    """Returns all commands with their subcommands and flags."""
    found = []
    for tool in launcher.tool_names():
        module = importlib.import_module(f"lingvo_gshard.tools.{tool}")
        subcommands = getattr(module, "SUBCOMMANDS", ("",))
        own: dict[str, list[Flag]]
        if isinstance(subcommands, Mapping):
            own = {
                name: _flags(importlib.import_module(path).define_flags())
                for name, path in subcommands.items()
            }
        else:
            # One set of flags serves all of them.
            own = dict.fromkeys(subcommands, _flags(module.define_flags()))
        found.append(Command(f"gshard-{tool}", own))
    return found


def _flags(values: flags.FlagValues) -> list[Flag]:
    """Returns a command's flags, with those that every command has."""
    startup.define_common_flags(values)
    # Names that flags accept without declaring them.
    known = {"experiment": tuple(experiments()), "strategy": strategies.base_names()}
    known["topology"] = topologies.names()
    found = [Flag("help", "Prints the help.", False), Flag("version", "Prints the version.", False)]
    for name in values:
        flag = values[name]
        offered = choices_of(flag) or known.get(name, ())
        is_file = flag.flag_type() not in _NUMBERS and not offered
        text = " ".join((flag.help or "").split())
        found.append(Flag(name, text, not flag.boolean, offered, is_file))
    return found
