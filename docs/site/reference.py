"""The reference of the site: Python from docstrings, commands from flags, and Params."""

from __future__ import annotations

import importlib

import lingvo_gshard
from docs.site import commands, hyperparameters, markdown, python_api
from lingvo_gshard.core import registry
from lingvo_gshard.core.letters import LETTERS


def pages() -> dict[str, str]:
    """Returns the pages of the reference by file name."""
    return {
        "python.md": python_api.page(),
        **commands.pages(),
        "hyperparameters.md": hyperparameters.page(),
        "experiments.md": _experiments_page(),
        "letters.md": letters_page(),
    }


def _experiments_page() -> str:
    importlib.import_module("lingvo_gshard.api.experiments")
    parts = ["# Experiments", "", "Made from the docstrings of experiments.", ""]
    for name in lingvo_gshard.experiments():
        parts += [f"## {name}", "", markdown.of_docstring(registry.describe(name)), ""]
    return "\n".join(parts)


def letters_page() -> str:
    """Returns the page of the letters that name dimensions."""
    rows = [f"| {letter} | {markdown.cell(found.meaning)} |" for letter, found in LETTERS.items()]
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
