"""The reference of the commands, made of the declarations of their flags and their pages of help.

A flag that several commands declare alike is described once, on the page of shared flags. Every
flag has an anchor on the page of its command: `#--mesh`, or `#step--repeats` for the subcommand
`step`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import ModuleType

from absl import flags

from docs.site import markdown
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.console.spelling import spell_flags_of, with_flags
from lingvo_gshard.tools.flags.definitions import choices_of

# The commands in the order of use, by what they are for.
GROUPS = {
    "Train a model and use it": ("train", "evaluate", "translate", "generate", "serve"),
    "Plan and prove": ("plan", "verify"),
    "Bring data and models in and out": ("prepare", "import", "export"),
    "Look inside": ("report", "inspect", "experts", "bench", "doctor"),
    "Clusters, checkpoints and the shell": ("launch", "checkpoints", "completion"),
}
SHARED = "flags.md"
_TO_OVERVIEW = ("[All commands](../commands.md)", "")
# Placeholders of values that are no texts, by the type of the flag.
_PLACEHOLDERS = {"int": "INTEGER", "float": "NUMBER", "comma separated list of strings": "TEXT,..."}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, or one subcommand, with its flags.

    Attributes:
      tool: the command's name without gshard-.
      subcommand: its name; "" for a command without subcommands.
      about: the purpose, and the page of help.
      operand: the name of an argument that is not a flag; "" without one.
    """

    tool: str
    subcommand: str
    about: str
    operand: str
    values: flags.FlagValues

    @property
    def name(self) -> str:
        """The name as a user types it."""
        return f"gshard-{self.tool} {self.subcommand}".strip()

    @property
    def address(self) -> str:
        """The page and, for a subcommand, the anchor."""
        return f"{self.tool}.md" + (f"#{self.subcommand}" if self.subcommand else "")

    def anchor(self, flag: str) -> str:
        """Returns the anchor of a flag on the command's page."""
        return f"{self.subcommand}--{flag}"


@functools.cache
def commands() -> dict[str, list[Command]]:
    """Returns the commands in the order of `GROUPS`, each with its subcommands."""
    return {tool: list(_commands_of(tool)) for tools in GROUPS.values() for tool in tools}


def _commands_of(tool: str) -> Iterator[Command]:
    module = importlib.import_module(f"lingvo_gshard.tools.{tool}")
    subcommands = getattr(module, "SUBCOMMANDS", {})
    if isinstance(subcommands, Mapping) and subcommands:
        for name, path in subcommands.items():
            yield _command(tool, name, importlib.import_module(path))
    else:
        yield _command(tool, "", module)


def _command(tool: str, subcommand: str, module: ModuleType) -> Command:
    about = startup.help_page(module.__doc__, module.__name__)
    operand = getattr(module, "OPERAND", ("", ""))[0]
    return Command(tool, subcommand, about, operand, module.define_flags())


def pages() -> dict[str, str]:
    """Returns the pages of the commands by file name."""
    found = {"commands.md": _overview(), f"commands/{SHARED}": _shared_page()}
    found |= {f"commands/{tool}.md": _page(tool) for tool in commands()}
    return found


def declaration(flag: flags.Flag) -> tuple[object, ...]:
    """Returns all that a user may know of a flag. Flags that agree in it are described once."""
    return (flag.name, form(flag), str(flag.default), meaning(flag), tuple(accepted(flag)))


def meaning(flag: flags.Flag) -> str:
    """Returns the description of a flag as sentences, without those that `facts` tells."""
    return plain(re.sub(r"[.;\s]*;\s*repeat this option to .*$", ".", " ".join(flag.help.split())))


def plain(text: str) -> str:
    """Returns a description without the sentence that a flag may be repeated."""
    return re.sub(r"[;.,]\s*may be repeated\.", ".", text, flags=re.IGNORECASE)


def form(flag: flags.Flag) -> str:
    """Returns a flag as a user types it, with a placeholder for its value."""
    if flag.boolean:
        return f"--{flag.name}"
    kind = flag.flag_type().removeprefix("multi ")
    return f"--{flag.name}={_PLACEHOLDERS.get(kind, 'TEXT')}"


def accepted(flag: flags.Flag) -> list[str]:
    """Returns the limits of a flag's values, such as "1 or more"; empty without limits."""
    found = []
    if choices_of(flag):
        found.append(f"one of {', '.join(f'`{choice}`' for choice in choices_of(flag))}")
    elif not flag.boolean and _bounds(flag.parser):
        found.append(_bounds(flag.parser))
    return [*found, "may be repeated"] if flag.flag_type().startswith("multi") else found


def _bounds(parser: flags.ArgumentParser) -> str:
    least = getattr(parser, "lower_bound", None)
    most = getattr(parser, "upper_bound", None)
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    if least is not None:
        return f"{least:g} or more"
    return "" if most is None else f"{most:g} or less"


def facts(flag: flags.Flag) -> str:
    """Returns the limits of a flag's values, and its default, as a sentence; "" without any."""
    default, found = flag.default, accepted(flag)
    if isinstance(default, (list, tuple)):
        default = ",".join(map(str, default))
    if default not in (None, "", False):
        found.append(f"default `{default}`")
    if not found:
        return ""
    text = "; ".join(found)
    return f" *{text[0].upper()}{text[1:]}.*"


def owners() -> dict[tuple[object, ...], list[Command]]:
    """Returns the commands that share a declaration."""
    found: dict[tuple[object, ...], list[Command]] = defaultdict(list)
    for several in commands().values():
        for command in several:
            for name in command.values:
                found[declaration(command.values[name])].append(command)
    return found


@functools.cache
def _shared() -> dict[tuple[object, ...], list[Command]]:
    """Returns the declarations of several commands: one for each name, the most frequent."""
    most: dict[object, tuple[object, ...]] = {}
    found = owners()
    for key, several in found.items():
        if len(several) > 1 and len(several) > len(found.get(most.get(key[0], ()), [])):
            most[key[0]] = key
    return {key: found[key] for key in found if most.get(key[0]) == key}


def address(command: Command, name: str) -> str:
    """Returns the address of the description of a flag, from a page of reference/commands/."""
    if declaration(command.values[name]) in _shared():
        return f"{SHARED}#--{name}"
    return f"{command.tool}.md#{command.anchor(name)}"


def _overview() -> str:
    parts = [
        "# Commands",
        "",
        "Each command has a page. Flags that several commands have are described once, under "
        f"[shared flags](commands/{SHARED}). In Python, most of them are arguments of the "
        "[functions](python.md) of the same name.",
        "",
    ]
    for title, tools in GROUPS.items():
        parts += [f"## {title}", "", "| command | purpose |", "|---|---|"]
        for tool in tools:
            module = importlib.import_module(f"lingvo_gshard.tools.{tool}")
            purpose = (module.__doc__ or "").strip().partition("\n")[0]
            parts.append(f"| [`gshard-{tool}`](commands/{tool}.md) | {purpose} |")
        parts.append("")
    return "\n".join([*parts, *_for_all()])


def _for_all() -> list[str]:
    """Returns the section on what all commands have."""
    values = flags.FlagValues()
    startup.define_common_flags(values)
    lines = ["## Flags of every command", ""]
    lines += ["### `--help` { #--help }", "", "Prints the help and exits.", ""]
    lines += ["### `--version` { #--version }", "", "Prints the version and exits.", ""]
    for name in values:
        lines += [f"### `--{name}` {{ #--{name} }}", "", f"{meaning(values[name])}", ""]
    return [
        *lines,
        "A flag whose name has dots sets a hyperparameter where a command has "
        f"[`--gin_param`](commands/{SHARED}#--gin_param): `--step.clip_norm=1.0`. The "
        "[hyperparameters](hyperparameters.md) have a page of their own.",
        "",
        "A mistake ends a command with exit code 1 and one line that names the flag.",
    ]


def _shared_page() -> str:
    parts = [
        "# Shared flags",
        "",
        "Flags that several commands have with the same meaning and default.",
        "",
    ]
    grouped: dict[tuple[str, ...], list[flags.Flag]] = defaultdict(list)
    spell_flags_of(str(key[0]) for key in _shared())
    for key, several in _shared().items():
        grouped[tuple(each.name for each in several)].append(several[0].values[str(key[0])])
    for names, found in grouped.items():
        parts += [f"## {_title(names)}", ""]
        for flag in found:
            links = Links(_shared()[declaration(flag)][0], SHARED)
            parts += _described(flag, f"--{flag.name}", links)
    return "\n".join(parts)


def _title(names: tuple[str, ...]) -> str:
    """Returns a heading for a group of commands."""
    tools = list(dict.fromkeys(name.removeprefix("gshard-").split()[0] for name in names))
    if len(tools) == 1:
        subcommands = [name.split()[1] for name in names]
        return f"gshard-{tools[0]}: {_listed(subcommands)}"
    return _listed([f"gshard-{tool}" for tool in tools])


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _page(tool: str) -> str:
    several = commands()[tool]
    if several[0].subcommand == "":
        return "\n".join([*_section(several[0], f"# gshard-{tool}", "##"), *_TO_OVERVIEW])
    module = importlib.import_module(f"lingvo_gshard.tools.{tool}")
    about = startup.help_page(module.__doc__, module.__name__)
    links = Links(several[0], f"{tool}.md")
    lines = [f"# gshard-{tool}", "", *links.within(markdown.of_help(_without_pointer(about))), ""]
    for command in several:
        title = f"## {command.subcommand} {{ #{command.subcommand} }}"
        lines += _section(command, title, "###")
    return "\n".join([*lines, *_TO_OVERVIEW])


def _without_pointer(about: str) -> str:
    """Returns a page of help without the sentence that leads to the help of subcommands."""
    return re.sub(r"\s*Each has its own help: [^.]*--help\.", "", about)


def _section(command: Command, title: str, level: str) -> list[str]:
    """Returns the section of a command, with headings for its flags at a level."""
    links = Links(command, f"{command.tool}.md")
    spell_flags_of(command.values)
    lines = [title, "", *links.within(markdown.of_help(command.about)), ""]
    if command.operand:
        lines += ["```text", f"{command.name} {command.operand.upper()} [FLAGS]", "```", ""]
    is_shared = {name: address(command, name).startswith(SHARED) for name in command.values}
    for name in command.values:
        if not is_shared[name]:
            lines += _described(command.values[name], command.anchor(name), links, level)
    shared = [
        f"[`--{name}`]({address(command, name)}){{ #{command.anchor(name)} }}"
        for name in command.values
        if is_shared[name]
    ]
    if shared:
        anchor = f"{command.subcommand}-shared-flags".lstrip("-")
        lines += [f"{level} Shared flags {{ #{anchor} }}", "", f"{', '.join(shared)}.", ""]
    return lines


def _described(flag: flags.Flag, anchor: str, links: Links, level: str = "###") -> list[str]:
    """Returns the heading of a flag with its anchor, and its meaning."""
    (text,) = links.within([with_flags(meaning(flag))], flag.name)
    return [f"{level} `{form(flag)}` {{ #{anchor} }}", "", text + facts(flag), ""]


class Links:
    """Makes links of the flags and commands that texts on a page name.

    A name in one text becomes a link once. A flag after the name of a command is of that command,
    else of the command of the text.
    """

    _NAMES = re.compile(
        r"(?<![\w/-])(?:gshard-(?P<tool>[a-z]+)(?P<subcommand> [a-z_]+)?(?: (?=--))?)?"
        r"(?:--(?P<flag>\w+)(?P<rest>(?:\.\w+)*(?:=[\w./:,@]*\w)?))?"
    )

    def __init__(self, command: Command, page: str):
        self._command, self._page = command, page
        self._seen: set[str] = set()

    def within(self, lines: list[str], own: str = "") -> list[str]:
        """Returns lines of Markdown whose flags and commands are code, and links where known.

        Blocks of code stay as they are, and so do links of the flag `own`.
        """
        self._seen = {self._place(f"{self._page}#{self._command.anchor(own)}")}
        return [line if line.startswith("```") else self._line(line) for line in lines]

    def _line(self, line: str) -> str:
        parts = line.split("`")
        parts[::2] = [self._NAMES.sub(self._link, part) for part in parts[::2]]
        return markdown.with_pages("`".join(parts), "../../")

    def _link(self, found: re.Match[str]) -> str:
        if not found[0]:
            return ""
        tool, subcommand, flag = found["tool"], (found["subcommand"] or "").strip(), found["flag"]
        if tool is not None and tool not in commands():
            return found[0]
        several = commands()[tool] if tool else [self._command]
        known = {each.subcommand: each for each in several}
        command = known.get(subcommand) if tool else self._command
        if command is None:
            # The word after the command is one of the sentence.
            command, rest = several[0], found[0].removeprefix(f"gshard-{tool}")
            return self._once(f"gshard-{tool}", f"{tool}.md") + self._NAMES.sub(self._link, rest)
        if flag is None:
            return self._once(command.name, command.address) + found[0][len(command.name) :]
        return self._once(found[0], address(command, flag) if flag in command.values else "")

    def _once(self, text: str, place: str) -> str:
        """Returns a text as code, and as a link if the place is not linked to yet."""
        place = self._place(place)
        if not place or place in self._seen:
            return f"`{text}`"
        self._seen.add(place)
        return f"[`{text}`]({place})"

    def _place(self, place: str) -> str:
        """Returns an address as seen from this page; "" for the page itself."""
        return place.removeprefix(self._page)
