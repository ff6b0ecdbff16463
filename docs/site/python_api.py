"""The reference of Python: the public names in the order of use, with signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import lingvo_gshard
from docs.site import commands, markdown
from lingvo_gshard.core import Options, declared
from lingvo_gshard.core.options import Option

# The public names in the order of use, by what they are for.
GROUPS = {
    "Choose an experiment": ("experiments", "experiment", "describe"),
    "Train": ("train", "RuntimeOptions", "ClusterOptions"),
    "Use a trained run": ("load", "Run", "DecodingOptions", "DecoderSettings", "report"),
    "Partition your own function": ("partition",),
    "Plan": ("plan", "plan_generation"),
    "Verify": ("verify",),
    "Bring in data": ("prepare", "Source", "PrepareOptions", "preparation_params"),
    "Bring in published models": ("open_model", "import_model"),
    "Keras": ("keras",),
}
# Longer signatures have a line for each argument.
_MOST_COLUMNS = 80
_KINDS = inspect._ParameterKind


def page() -> str:
    """Returns the page of the Python API."""
    parts = [
        "# Python API",
        "",
        "The names of `lingvo_gshard` in the order of use. Examples begin with "
        "`import lingvo_gshard as gshard`; the [tutorial](../python_api.md) shows them at work "
        "together. A field that leads to a flag has the flag's meaning.",
        "",
    ]
    for title, names in GROUPS.items():
        parts += [f"## {title}", ""]
        for name in names:
            parts += entry(f"gshard.{name}", getattr(lingvo_gshard, name))
    return "\n".join(parts)


def entry(name: str, value: Any) -> list[str]:
    """Returns the section of a public name, and those of its methods or of a module's names."""
    short = name.rpartition(".")[2]
    if inspect.ismodule(value):
        lines = [_markdown(value.__doc__), ""]
        for each in value.__all__:
            lines += entry(f"{name}.{each}", getattr(value, each))
        return lines
    lines = [f"### {name}", ""]
    if dataclasses.is_dataclass(value):
        lines += [_markdown(with_fields(value)), ""]
    else:
        lines += [f"```python\n{short}{signature(value)}\n```", "", _markdown(value.__doc__), ""]
    properties = [
        f"- `{each}`: {_summary(found)}" for each, found in _members(value) if _is_property(found)
    ]
    if properties:
        lines += ["**Properties**", "", *properties, ""]
    for method, function in methods(value):
        lines += [f"#### {short}.{method}", ""]
        lines += [f"```python\n{method}{signature(function)}\n```", ""]
        lines += [_markdown(function.__doc__), ""]
    return lines


def methods(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yields the public methods of a class, its own first, in the order of the class."""
    for name, found in _members(cls):
        function = getattr(found, "__func__", found)
        if inspect.isfunction(function):
            yield name, function


def _members(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a class and its bases define under public names and describe; no other value."""
    seen: set[str] = set()
    for base in inspect.getmro(cls)[:-1] if inspect.isclass(cls) else ():
        for name, found in vars(base).items():
            is_new = name not in seen and not name.startswith("_")
            seen.add(name)
            if is_new and getattr(found, "__doc__", None) and not isinstance(found, type):
                yield name, found


def _is_property(found: Any) -> bool:
    return isinstance(found, (property, functools.cached_property))


def _summary(found: Any) -> str:
    return found.__doc__.partition("\n\n")[0].strip()


def _markdown(docstring: str | None) -> str:
    return markdown.with_pages(markdown.of_docstring(docstring or ""), "../")


def with_fields(cls: Any) -> str:
    """Returns the docstring of a dataclass, with the type and the default of each attribute.

    An option that is also a flag leads to the description of the flag.
    """
    about, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:\n")
    found = [" ".join(each.split()).partition(": ") for each in _ENTRY.split(attributes)]
    meanings = {name: meaning for name, _, meaning in found}
    options = declared(cls) if issubclass(cls, Options) else {}
    lines = []
    for field in dataclasses.fields(cls):
        option = options.get(field.name)
        meaning = _flag_of(option) if option else meanings[field.name]
        has_default = field.default is not dataclasses.MISSING
        default = f" = {field.default!r}" if has_default else ""
        lines.append(f"- `{field.name}: {field.type}{default}`: {meaning}")
    return "\n".join([about, "", "Attributes:", *lines])


# Entries of a list of attributes are indented by two spaces, and their further lines by more.
_ENTRY = re.compile(r"\n(?=  \w)")


def _flag_of(option: Option) -> str:
    """Returns a link to the flag that an option is; the description if no command has it.

    Commands may add to the description. The flag that adds least is taken.
    """
    help_ = commands.plain(option.help)
    found = [
        (len(commands.meaning(command.values[option.name])), commands.address(command, option.name))
        for several in commands.commands().values()
        for command in several
        if option.name in command.values
        and commands.meaning(command.values[option.name]).startswith(help_.rstrip("."))
    ]
    return f"[`--{option.name}`](commands/{min(found)[1]})." if found else option.help


def signature(value: Any) -> str:
    """Returns a signature with its types, one argument a line if it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters: list[str] = []
    kinds = [each.kind for each in found.parameters.values()]
    for index, each in enumerate(found.parameters.values()):
        if each.name == "self":
            continue
        if each.kind is _KINDS.KEYWORD_ONLY and not set(kinds[:index]) & _STARS:
            parameters.append("*")
        parameters.append(_clean(str(each)))
        is_last_positional = kinds[index + 1 : index + 2] != [_KINDS.POSITIONAL_ONLY]
        if each.kind is _KINDS.POSITIONAL_ONLY and is_last_positional:
            parameters.append("/")
    returned = found.return_annotation
    ending = "" if returned is inspect.Signature.empty or inspect.isclass(value) else returned
    arrow = f" -> {ending}" if isinstance(ending, str) and ending else ""
    text = f"({', '.join(parameters)}){arrow}"
    if len(text) < _MOST_COLUMNS:
        return text
    return "(\n    " + ",\n    ".join(parameters) + f",\n){arrow}"


# Kinds of a parameter after which another one needs no star.
_STARS = {_KINDS.VAR_POSITIONAL, _KINDS.KEYWORD_ONLY}


def _clean(parameter: str) -> str:
    """Returns a parameter without the quotes of its annotation and the address of its default."""
    text = re.sub(r"<([\w.]+) object at 0x\w+>", "...", parameter)
    return re.sub(r": '([^']+)'", r": \1", text)
