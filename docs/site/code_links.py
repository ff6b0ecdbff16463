"""Links from the code that pages name, such as `gshard-plan --json`, to the reference."""

from __future__ import annotations

import re

from docs.site import commands, python_api

_FENCE = "```"
# Code in a sentence that is not the text of a link yet.
_CODE = re.compile(r"(?<![\[`])`(gshard[-.][^`]+)`(?![`\]])")
_COMMAND = re.compile(r"gshard-(\w+)(?: ([a-z_]+))?(?: --(\w+)(?:=\S*)?)?")
# Public names with a heading of their own.
_FUNCTIONS = {name for names in python_api.GROUPS.values() for name in names} - {"keras"}
_NAME = re.compile(r"(?:lingvo_)?gshard\.(\w+)(?:\(.*\))?")


def with_links(text: str, root: str) -> str:
    """Returns a page whose commands, flags and public names are links, each at its first mention.

    Args:
      text: the page as Markdown. Titles and blocks of code stay as they are.
      root: the path from the page to the root of the site, such as "../".
    """
    seen: set[str] = set()

    def link(code: re.Match[str]) -> str:
        place = address(code[1])
        if not place or place in seen:
            return code[0]
        seen.add(place)
        return f"[{code[0]}]({root}reference/{place})"

    lines, is_block = [], False
    for line in text.split("\n"):
        is_block ^= line.lstrip().startswith(_FENCE)
        is_sentence = not (is_block or line.lstrip().startswith((_FENCE, "#")))
        lines.append(_CODE.sub(link, line) if is_sentence else line)
    return "\n".join(lines)


def address(code: str) -> str:
    """Returns the place of a command, a flag of a command or a public name; "" for other code."""
    if (name := _NAME.fullmatch(code)) and name[1] in _FUNCTIONS:
        return f"python.md#gshard{name[1].lower()}"
    if not (found := _COMMAND.fullmatch(code)) or found[1] not in commands.commands():
        return ""
    tool, subcommand, flag = found.groups()
    if tool == "completion":
        return f"commands/{tool}.md"
    several = {each.subcommand: each for each in commands.commands()[tool]}
    command = several.get(subcommand or "")
    if command is None:
        return "" if subcommand or flag else f"commands/{tool}.md"
    if flag is None:
        return f"commands/{command.address}"
    if flag in ("help", "version", "import"):
        return f"commands.md#--{flag}"
    return f"commands/{commands.address(command, flag)}" if flag in command.values else ""
