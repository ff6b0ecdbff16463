"""The reference of the site: Python from docstrings, commands from flags, and Params."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lingvo_gshard
from lingvo_gshard import keras as gshard_keras
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.tools.console.launcher import tool_names
from lingvo_gshard.wings.gin.binding import gin_name

# Experiments whose trees together have the hyperparameters of tasks, inputs and steps.
_TREES = ("translation.quickstart", "language_model.quickstart")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ENTRY = re.compile(r"^  (\*{0,2}[\w.]+): (.*)$")


def pages() -> dict[str, str]:
    """Returns the pages of the reference by file name."""
    return {
        "python.md": _python_page(),
        "commands.md": _commands_page(),
        "hyperparameters.md": _params_page(),
        "experiments.md": _experiments_page(),
        "letters.md": _letters_page(),
    }


def in_markdown(docstring: str) -> str:
    """Returns a docstring in Google's style as Markdown: arguments become lists."""
    lines = []
    for line in inspect.cleandoc(docstring).splitlines():
        if section := _SECTION.match(line):
            lines += ["", f"**{section[1]}**", ""]
        elif entry := _ENTRY.match(line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(line)
    return "\n".join(_with_code(lines))


def _with_code(lines: list[str]) -> Iterator[str]:
    """Yields lines; what is indented by four spaces after an empty line becomes a block of code."""
    is_code = False
    for index, line in enumerate(lines):
        starts = line.startswith("    ") and (not index or not lines[index - 1])
        if starts and not is_code:
            is_code = True
            yield "```text"
        if is_code and line and not line.startswith("    "):
            is_code = False
            yield "```\n"
        yield line
    if is_code:
        yield "```"


def _python_page() -> str:
    parts = ["# Python API", "", "Made from the docstrings of `lingvo_gshard`.", ""]
    for name in sorted(set(lingvo_gshard.__all__) - {"keras"}, key=str.lower):
        parts += _entry("lingvo_gshard", name, getattr(lingvo_gshard, name))
    parts += ["## lingvo_gshard.keras", "", in_markdown(gshard_keras.__doc__ or ""), ""]
    for name in gshard_keras.__all__:
        parts += _entry("lingvo_gshard.keras", name, getattr(gshard_keras, name))
    return "\n".join(parts)


def _entry(module: str, name: str, value: Any) -> list[str]:
    """Returns the heading, the signature and the docstring of a public name, and its methods."""
    lines = [f"## {module}.{name}", "", f"```python\n{name}{_signature(value)}\n```", ""]
    lines += [in_markdown(value.__doc__ or ""), ""]
    if inspect.isclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__doc__:
                lines += [f"### {name}.{method}", ""]
                lines += [f"```python\n{method}{_signature(function)}\n```", ""]
                lines += [in_markdown(function.__doc__), ""]
    return lines


def _signature(value: Any) -> str:
    """Returns a signature, one argument a line if it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [_clean(str(parameter)) for parameter in signature.parameters.values()]
    text = f"({', '.join(parameters)})"
    return text if len(text) < _MOST_COLUMNS else "(\n    " + ",\n    ".join(parameters) + ",\n)"


# Longer signatures have a line for each argument.
_MOST_COLUMNS = 80


def _clean(parameter: str) -> str:
    """Returns a parameter without the quotes of its annotation and the address of its default."""
    text = re.sub(r"<([\w.]+) object at 0x\w+>", "...", parameter)
    return re.sub(r": '([^']+)'", r": \1", text)


def _commands_page() -> str:
    parts = ["# Commands", "", "Made from `--help` of each command.", ""]
    for tool in tool_names():
        help_text = subprocess.run(
            [sys.executable, "-m", "lingvo_gshard", tool, "--help"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        parts += [f"## gshard-{tool}", "", "```text", help_text.rstrip(), "```", ""]
    return "\n".join(parts)


def _params_page() -> str:
    parts = [
        "# Hyperparameters",
        "",
        "Made from the Params of experiments. `--gin_param='path = value'` sets one; `--params` of "
        "`gshard-train` prints those of any experiment.",
        "",
    ]
    for name in _TREES:
        params = registry.get(name)
        parts += [f"## {name}", ""]
        for path, node in params.nodes():
            rows = [
                f"| `{child}` | `{_short(value)}` | {_cell(node.help(child))} |"
                for child, value in node.items()
                if not _holds_params(value)
            ]
            if rows:
                parts += [f"### {name}: {gin_name(path) or 'root'}", ""]
                parts += ["| name | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _holds_params(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_params, value))
    return isinstance(value, Params)


def _short(value: Any) -> str:
    text = f"@{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
    text = text if len(text) < 60 else f"{text[:56]} ..."
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _experiments_page() -> str:
    importlib.import_module("lingvo_gshard.api.experiments")
    parts = ["# Experiments", "", "Made from the docstrings of experiments.", ""]
    for name in lingvo_gshard.experiments():
        parts += [f"## {name}", "", in_markdown(registry.describe(name)), ""]
    return "\n".join(parts)


def _letters_page() -> str:
    rows = [f"| {letter} | {_cell(found.meaning)} |" for letter, found in LETTERS.items()]
    return "\n".join(
        [
            "# Letters",
            "",
            "Made from `core/letters.py`.",
            "",
            "| letter | dimension |",
            "|---|---|",
            *rows,
        ]
    )
