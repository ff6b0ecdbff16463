"""Texts of the code as Markdown: docstrings in Google's style, and pages of help."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
from collections.abc import Iterator

_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ENTRY = re.compile(r"^  (\*{0,2}[\w.]+(?:, [\w.]+)*): (.*)$")
# An argument that is described elsewhere.
_ELSEWHERE = re.compile(r"^- (`[^:]+`): (as (?:for|in) `[\w.]+`)\.?$")
_INDENT = " " * 4
_DOCS = pathlib.Path(__file__).parents[1]
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
_SHELL = re.compile(r"^(gshard-|curl |source |echo |python )", re.MULTILINE)


def of_docstring(docstring: str) -> str:
    """Returns a docstring in Google's style as Markdown: arguments become lists.

    Arguments one after another that are described in the same other place become one entry.
    """
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if section := _SECTION.match(line):
            lines += [f"**{section[1]}**", ""]
        elif entry := _ENTRY.match(line):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
            _join_last_two(lines)
        else:
            lines.append(line)
    return "\n".join(with_blocks(lines))


def _join_last_two(lines: list[str]) -> None:
    """Joins the last two entries of a list if both are described in the same other place."""
    found = [_ELSEWHERE.match(line) for line in lines[-2:]]
    if len(found) == 2 and found[0] and found[1] and found[0][2] == found[1][2]:
        lines[-2:] = [f"- {found[0][1]}, {found[1][1]}: {found[0][2]}"]


def of_help(text: str) -> list[str]:
    """Returns a page of help as lines of Markdown."""
    return list(with_blocks([_escaped(line) for line in text.splitlines()]))


def _escaped(line: str) -> str:
    """Returns a line whose characters mean nothing in Markdown or HTML, unless it is code."""
    if line.startswith(_INDENT):
        return line
    parts = line.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def cell(text: str) -> str:
    """Returns a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def with_pages(line: str, root: str) -> str:
    """Returns a line whose pages, such as docs/runs.md, are links with the titles of the pages.

    Args:
      line: of Markdown.
      root: the path from the page with the line to the root of the site, such as "../".
    """
    return _PAGE.sub(lambda page: f"[{_title(page[1])}]({root}{page[1]}.md)", line)


@functools.cache
def _title(page: str) -> str:
    return (_DOCS / f"{page}.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")


def with_blocks(lines: list[str]) -> Iterator[str]:
    """Yields lines; what is indented by four spaces after an empty line becomes a block of code.

    So does an example of Python, up to the next empty line.
    """
    index = 0
    while index < len(lines):
        is_first = index == 0 or not lines[index - 1]
        is_example = lines[index].lstrip().startswith(">>> ")
        if not (is_example or (is_first and lines[index].startswith(_INDENT))):
            yield lines[index]
            index += 1
            continue
        end = index
        while end < len(lines) and (lines[end] if is_example else _continues(lines[end])):
            end += 1
        block = "\n".join(line.removeprefix(_INDENT) for line in lines[index:end]).strip("\n")
        yield f"```{_language(block)}\n{block}\n```"
        yield ""
        index = end


def _continues(line: str) -> bool:
    """Returns whether a line belongs to a block of code that began before."""
    return not line or line.startswith(_INDENT)


def _language(block: str) -> str:
    if block.startswith(">>> "):
        return "pycon"
    return "bash" if _SHELL.search(block) else "text"
