"""Scripts that complete commands in bash, zsh and fish."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.core import objects


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, by its name without dashes. `=VALUE` follows if it has a value."""

    name: str
    help: str
    has_value: bool
    values: tuple[str, ...] = ()
    is_file: bool = False

    @property
    def typed(self) -> str:
        """Returns what a user types."""
        return f"--{self.name}=" if self.has_value else f"--{self.name}"

    @property
    def summary(self) -> str:
        """Returns the first sentence of the help."""
        return re.split(r"(?<=[.;:])\s", self.help, maxsplit=1)[0].rstrip(".;:")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command with the flags of each subcommand. Without subcommands it has one, named ""."""

    name: str
    flags: Mapping[str, list[Flag]]

    @property
    def subcommands(self) -> str:
        """Returns the subcommands, separated by spaces."""
        return " ".join(self.flags)


def _filled(shell: str, parts: Mapping[str, str]) -> str:
    """Returns the script of a shell, completion.<shell>, with texts in place of @names@."""
    script = objects.text_beside(__file__, f"completion.{shell}")
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def bash(commands: Sequence[Command]) -> str:
    """Returns the script for bash 4 and later."""
    flags, words = [], []
    for command in commands:
        for subcommand, own in command.flags.items():
            pattern = f"{command.name}\\ {subcommand or '*'}"
            flags.append(f"    {pattern}) echo '{' '.join(flag.typed for flag in own)}' ;;")
        if command.subcommands:
            words.append(f"    {command.name}) echo '{command.subcommands}' ;;")
    # Commands agree on the values of a flag.
    by_name = {flag.name: flag for each in commands for own in each.flags.values() for flag in own}
    values = [
        f"    --{flag.name}) echo {shlex.quote(' '.join(flag.values))} ;;"
        for flag in by_name.values()
        if flag.has_value and not flag.is_file
    ]
    parts = {
        "flags": "\n".join(flags),
        "words": "\n".join(words),
        "values": "\n".join(values),
        "commands": " ".join(command.name for command in commands),
    }
    return _filled("bash", parts)


def zsh(commands: Sequence[Command]) -> str:
    """Returns the script for zsh."""
    cases = []
    for command in commands:
        for subcommand, own in command.flags.items():
            specs = [_zsh_flag(flag) for flag in own]
            specs.append(_zsh_words(command))
            pattern = f"'{command.name} '{subcommand or '*'}"
            cases.append(f"    {pattern}) specs=({' '.join(specs)}) ;;")
        if command.subcommands:
            cases.append(f"    '{command.name} '*) specs=({_zsh_words(command)}) ;;")
    names = " ".join(command.name for command in commands)
    return _filled("zsh", {"cases": "\n".join(cases), "commands": names})


def _zsh_words(command: Command) -> str:
    if command.subcommands:
        return f"'1:subcommand:({command.subcommands})' '*:file:_files'"
    return "'*:file:_files'"


def _zsh_flag(flag: Flag) -> str:
    """Returns a flag as _arguments takes it."""
    text = re.sub(r"([\[\]:\\])", r"\\\1", flag.summary)
    spec = f"*{flag.typed}[{text}]"
    if flag.has_value:
        offered = "_files" if flag.is_file else f"({' '.join(flag.values)})"
        spec += f":{flag.name}:{offered}"
    return shlex.quote(spec)


def fish(commands: Sequence[Command]) -> str:
    """Returns the script for fish."""
    lines = ["# Completes gshard-* commands in fish. Written by: gshard-completion fish"]
    for command in commands:
        if command.subcommands:
            words = f"-a '{command.subcommands}'"
            lines.append(f"complete -c {command.name} -n __fish_use_subcommand -f {words}")
        for subcommand, own in command.flags.items():
            condition = f" -n '__fish_seen_subcommand_from {subcommand}'" if subcommand else ""
            lines += [f"complete -c {command.name}{condition} {_fish_flag(flag)}" for flag in own]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    """Returns a flag as the arguments of fish's `complete`."""
    text = flag.summary.replace("\\", "\\\\").replace("'", "\\'")
    parts = [f"-l {flag.name}", f"-d '{text}'"]
    if flag.has_value:
        parts.insert(1, "-r" if flag.is_file else "-x")
    if flag.values:
        parts.append(f"-a {shlex.quote(' '.join(flag.values))}")
    return " ".join(parts)


SCRIPTS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
