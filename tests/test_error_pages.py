# tests: /docs/
"""Checks that the pages of errors show messages that the code has."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("errors_*.md"))
# Messages of XLA and of the system.
OF_OTHERS = ("RESOURCE_EXHAUSTED", "exit code 137")
_MESSAGE = re.compile(r"^## (.+)$", re.MULTILINE)


def _text(node: ast.expr) -> str:
    """Returns a string expression; each value in it is a line break."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
    return "\n"


@functools.cache
def _texts() -> str:
    """Returns all texts of the package, one below the other."""
    return "\n\n".join(
        _text(node)
        for path in sorted((ROOT / "lingvo_gshard").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_messages_on_a_page_are_those_of_the_code(page):
    found = _MESSAGE.findall(page.read_text(encoding="utf-8"))
    assert found
    for message in found:
        if message not in OF_OTHERS:
            parts = [part.strip() for part in message.split("...")]
            missing = [part for part in parts if part and part not in _texts()]
            assert not missing, f"{message}: {missing}"


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    linked = re.findall(r"\((errors_\w+\.md)\)", index)
    assert sorted(linked) == [page.name for page in PAGES]
