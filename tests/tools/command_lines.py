"""Finds the commands of this package in shell lines, and checks their flags without a run."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from types import ModuleType

from absl import flags

import lingvo_gshard as gshard
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.planning.machines import topologies

_PROGRAM = re.compile(r"(?:[\w./-]*/)?gshard-(\w+)")
# A request for the help, and the modules of a user.
_SKIPPED = re.compile(r"--(help$|import=)")
_ENDS = frozenset("|;&()<>")
# What a user replaces: NAME, <name>, $variable, {a,b} and "...".
_PLACEHOLDER = re.compile(r"^[A-Z_]+$|[<$]|\.\.\.|{\w+}")


def commands_in(line: str) -> Iterator[list[str]]:
    """Yields the words of each command of this package in a line, up to its end or redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        name = _PROGRAM.fullmatch(word)
        if (name or set(word) <= _ENDS) and words:
            yield words
            words = []
        if name:
            words = [f"gshard-{name[1]}"]
        elif words:
            words.append(word)
    if words:
        yield words


def module_of(words: list[str]) -> ModuleType:
    """Returns the module with the flags of a command, or of its subcommand."""
    module = importlib.import_module(f"lingvo_gshard.tools.{words[0].removeprefix('gshard-')}")
    subcommands = getattr(module, "SUBCOMMANDS", {})
    if subcommands and len(words) > 1 and not words[1].startswith("--"):
        assert words[1] in subcommands, f"{words}: there is no such subcommand"
        if isinstance(subcommands, Mapping):
            return importlib.import_module(subcommands[words[1]])
    return module


def flags_of(words: list[str]) -> flags.FlagValues:
    """Returns the flags of a command, without the given values."""
    module = module_of(words)
    return module.define_flags() if hasattr(module, "define_flags") else flags.FlagValues()


def check(words: list[str]) -> None:
    """Raises an error if a command has not the flags of a line, or refuses their values.

    Types and bounds of values are checked, names of experiments, hyperparameters and machines, and
    the values of hyperparameters. Modules and classes of a user are not imported.
    """
    end = words.index("--") if "--" in words else len(words)
    given = [word for word in words[1:end] if word.startswith("--") and not _SKIPPED.match(word)]
    if any(map(_PLACEHOLDER.search, [flag.partition("=")[2] for flag in given])):
        for flag in given:
            check_name(words, flag)
        return
    values = startup.parse_flags(flags_of(words), [words[0], *given], None)
    if "topology" in values and values.topology:
        for name in values.topology.split(","):
            topologies.get(name)
    if "experiment" in values and _is_of_package(values.experiment or ""):
        settings = values.gin_param if "gin_param" in values else ()
        settings = tuple(each for each in settings if "= @my_" not in each)
        if "gin_file" not in values or not values.gin_file:
            gshard.experiment(values.experiment, settings)


def check_name(words: list[str], flag: str) -> None:
    """Raises an error if a command has no flag of a name."""
    name = flag.partition("=")[0].removeprefix("--")
    values = flags_of(words)
    startup.define_common_flags(values)
    known = {*values, "help", "version", *(f"no{each}" for each in values if values[each].boolean)}
    assert name in known or ("." in name and "gin_param" in values), f"{words}: no flag {flag}"


def _is_of_package(experiment: str) -> bool:
    """Returns whether a name is of a family of the package's experiments, registered or not."""
    return experiment.partition(".")[0] in _families()


@functools.cache
def _families() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in gshard.experiments())
