# tests: /tests/
"""Tests that the names which tests patch are there; slow tests would fail only when they run."""

import ast
import importlib
from collections.abc import Iterator

import pytest

from tests.belonging import ROOT

SETTERS = ("monkeypatch.setattr", "patch.setattr", "mock.patch.object", "mock.patch")


def dotted(node: ast.expr) -> str:
    """Returns the text of a name with dots; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.Module) -> dict[str, str]:
    """Returns name -> path of what a file imports."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                path = one.name if one.asname else one.name.partition(".")[0]
                names[one.asname or path] = path
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def patched(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the path of each attribute of an imported object that a file patches."""
    tree = ast.parse(text)
    paths = imported(tree)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not dotted(call.func).endswith(SETTERS):
            continue
        match call.args:
            case [ast.Constant(value=str(path)), *_]:
                yield call.lineno, path
            case [owner, ast.Constant(value=str(name)), *_]:
                head, *rest = dotted(owner).split(".")
                if head in paths:
                    yield call.lineno, ".".join((paths[head], *rest, name))


def find(path: str) -> object:
    """Returns the object at a path. Raises AttributeError if it is not there."""
    head, *names = path.split(".")
    found = importlib.import_module(head)
    for name in names:
        head = f"{head}.{name}"
        if not hasattr(found, name):
            try:
                importlib.import_module(head)
            except ImportError:
                raise AttributeError(f"there is no {head}") from None
        found = getattr(found, name)
    return found


def test_patched_names_are_there():
    count, missing = 0, []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for line, path in patched(file.read_text(encoding="utf-8")):
            count += 1
            try:
                find(path)
            except AttributeError as error:
                missing.append(f"{file.relative_to(ROOT)}:{line}: {error}")
    assert not missing, "\n".join(missing)
    assert count > 200


@pytest.mark.parametrize(
    "patch",
    [
        'monkeypatch.setattr(os.path, "joined", 1)',
        'monkeypatch.setattr("os.path.joined", 1)',
        'unittest.mock.patch.object(path, "joined", 1)',
    ],
)
def test_a_missing_name_is_found(patch):
    ((line, path),) = patched(f"import os\nfrom os import path\n{patch}\n")
    assert (line, path) == (3, "os.path.joined")
    with pytest.raises(AttributeError, match=r"no os\.path\.joined"):
        find(path)
