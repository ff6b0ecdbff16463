"""Makes notebooks of tutorials, whose `python` blocks together are one script.

    python -m docs.site.notebooks build/notebooks

The pages in docs/ are the only source, so notebooks are never out of date, and have no outputs.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

DOCS = pathlib.Path(__file__).parents[1]
# Pages that are notebooks, too.
PAGES = (
    "first_eight_devices.md",
    "first_fine_tuning.md",
    "first_language_model.md",
    "first_translation.md",
    "keras.md",
    "plan_a_giant.md",
    "python_api.md",
    "your_own_layer.md",
)
# A block of code, and the block with its output.
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")
# What nbformat 4.5 asks for.
_VERSION = {"nbformat": 4, "nbformat_minor": 5}
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook(page: str) -> dict[str, Any]:
    """Returns a page as a notebook in nbformat 4.5, without outputs.

    Text between two blocks becomes one cell. Links to other pages lose their targets, which a
    notebook on another machine does not have.
    """
    cells, end = [], 0
    for block in CODE.finditer(page):
        cells += _text_cell(page[end : block.start()])
        cells.append({"cell_type": "code", "execution_count": None, "outputs": [], **_of(block[1])})
        end = block.end()
    cells += _text_cell(page[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {**_VERSION, "metadata": {"kernelspec": _KERNEL}, "cells": cells}


def write(folder: pathlib.Path) -> None:
    """Writes the notebooks of all PAGES into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        made = notebook((DOCS / name).read_text(encoding="utf-8"))
        text = json.dumps(made, ensure_ascii=False, indent=1)
        (folder / name).with_suffix(".ipynb").write_text(f"{text}\n", encoding="utf-8")


def _text_cell(text: str) -> list[dict[str, Any]]:
    text = _LINK.sub(r"\1", text).strip()
    return [{"cell_type": "markdown", **_of(text)}] if text else []


def _of(source: str) -> dict[str, Any]:
    return {"metadata": {}, "source": source.rstrip("\n").splitlines(keepends=True)}


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
