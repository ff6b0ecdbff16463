"""Spells options as flags of the command that runs.

The library writes an option in backquotes, as a caller of the API sets it: `mesh=data=4`. The
library writes Params as in a gin file: `run.steps = 5`. A command line has flags for both.
"""

from __future__ import annotations

from collections.abc import Iterable

# Flags that have another name than the argument of the API.
_FLAGS = {"settings": "gin_param", "gin_files": "gin_file"}


# The flags of the command. A process runs one command.
_names: set[str] = set()


def spell_flags_of(names: Iterable[str]) -> None:
    """Sets the names of the command's flags."""
    _names.clear()
    _names.update(names)


def flag_of(setting: str) -> str:
    """Returns a setting, such as "mesh=data=4" or "run.steps = 5", as a flag."""
    if "." in setting.partition(" = ")[0] and " = " in setting:
        return f"--gin_param={setting}"
    name, equals, value = setting.partition("=")
    return f"--{_FLAGS.get(name, name)}{equals}{value}"


def with_flags(text: str) -> str:
    """Returns a text with the command's options in backquotes spelled as flags."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        # A backquote without a partner belongs to a user's text.
        return text
    parts[1::2] = map(_quoted, parts[1::2])
    return "".join(parts)


def _quoted(setting: str) -> str:
    """Returns a quoted setting as a flag, ready to paste into a shell if a space is in it."""
    flag = flag_of(setting)
    name, equals, value = flag.partition("=")
    if name.removeprefix("--") not in _names:
        path = setting.partition("=")[0].partition("[")[0]
        is_path = "." in path and all(part.isidentifier() for part in path.split("."))
        return setting if is_path else f"`{setting}`"
    return f"{name}='{value}'" if equals and " = " in value else flag
