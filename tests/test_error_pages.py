# tests: /docs/
"""Checks that the page of errors shows messages that the code has."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
# Messages of XLA and of the system.
OF_OTHERS = ("RESOURCE_EXHAUSTED", "exit code 137")
_MESSAGE = re.compile(r"^### (.+)$", re.MULTILINE)


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


@pytest.mark.parametrize("message", _MESSAGE.findall(PAGE))
def test_messages_on_the_page_are_those_of_the_code(message):
    if message not in OF_OTHERS:
        parts = [part.strip() for part in message.split("...")]
        missing = [part for part in parts if part and part not in _texts()]
        assert not missing


def test_the_index_has_every_family():
    families = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert re.findall(r"^\| \[(.+)\]\(#[\w-]+\) \|", PAGE, re.MULTILINE) == families
    assert len(_MESSAGE.findall(PAGE)) > 40
