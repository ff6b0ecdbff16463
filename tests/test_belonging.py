# tests: /tests/belonging.py
"""Tests which tests belong to a file, and that every test and every file of the package has one."""

import ast
import pathlib
import subprocess

import pytest

from tests.belonging import PACKAGE, ROOT, Belonging, changed_since

FILES = {
    "lingvo_gshard/layers/norm.py": "",
    "lingvo_gshard/layers/moe/routing.py": "",
    "lingvo_gshard/layers/moe/capacity.py": "",
    "lingvo_gshard/tools/plan.py": "",
    "docs/moe.md": "",
    "tests/layers/test_norm.py": '"""Tests norms."""\n',
    "tests/layers/experts/test_capacity.py": "from tests.layers import tiny\n",
    "tests/layers/test_paper.py": "# tests: layers/moe/routing.py\n# tests: layers/norm.py, /docs/",
    "tests/layers/tiny.py": "from tests.layers.words import WORDS\n",
    "tests/layers/words.py": "WORDS = []\n",
    "tests/layers/rows.json": "[]",
    "tests/tools/test_commands.py": "# tests: tools/\n\nRUN = ['tests.layers.words']\n",
}


@pytest.fixture
def belonging(tmp_path):
    """Returns the tests of a small repository."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Belonging(tmp_path)


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("lingvo_gshard/layers/norm.py", ["layers/test_norm.py", "layers/test_paper.py"]),
        ("lingvo_gshard/layers/moe/routing.py", ["layers/test_paper.py"]),
        # The name stands once below layers/, in another folder than the test.
        ("lingvo_gshard/layers/moe/capacity.py", ["layers/experts/test_capacity.py"]),
        (
            "lingvo_gshard/layers/moe",
            ["layers/experts/test_capacity.py", "layers/test_paper.py"],
        ),
        ("lingvo_gshard/tools/plan.py", ["tools/test_commands.py"]),
        ("docs/moe.md", ["layers/test_paper.py"]),
        ("docs", ["layers/test_paper.py"]),
        ("tests/tools", ["tools/test_commands.py"]),
        ("tests/layers/test_norm.py", ["layers/test_norm.py"]),
        # Who imports it, who imports that, and who runs it by its name.
        ("tests/layers/words.py", ["layers/experts/test_capacity.py", "tools/test_commands.py"]),
        (
            "tests/layers/rows.json",
            ["layers/experts/test_capacity.py", "layers/test_norm.py", "layers/test_paper.py"],
        ),
        ("README.md", []),
    ],
)
def test_tests_of_a_path(belonging, path, tests):
    assert belonging.tests_of([path]) == {path: [f"tests/{name}" for name in tests]}


def test_a_name_of_two_files_belongs_to_neither(belonging):
    test = "tests/layers/experts/test_capacity.py"
    (belonging.root / "lingvo_gshard/layers/capacity.py").write_text("")
    assert Belonging(belonging.root).tested[test] == []
    # Unless one is in the folder of the test.
    same = belonging.root / "lingvo_gshard/layers/experts/capacity.py"
    same.parent.mkdir()
    same.write_text("")
    assert Belonging(belonging.root).tested[test] == ["lingvo_gshard/layers/experts/capacity.py"]


def test_files_that_git_says_are_changed(tmp_path):
    def git(*command):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *settings, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("changed.py", "committed.py", "gone.py", "same.py"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "committed.py").write_text("2")
    git("commit", "-am", "second")
    (tmp_path / "changed.py").write_text("2")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "a new one.py").write_text("")
    assert changed_since("HEAD", tmp_path) == ["a new one.py", "changed.py"]
    assert changed_since("HEAD~1", tmp_path) == ["a new one.py", "changed.py", "committed.py"]
    with pytest.raises(ValueError, match="nowhere"):
        changed_since("nowhere", tmp_path)


def test_every_test_file_says_whose_it_is():
    """By its name, or by lines above its docstring."""
    belonging = Belonging()
    silent = [test for test, tested in belonging.tested.items() if not tested]
    assert not silent, silent


def test_test_files_name_what_there_is():
    belonging = Belonging()
    missing = [
        f"{test}: {path}"
        for test, tested in belonging.tested.items()
        for path in tested
        if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file())
    ]
    assert not missing, missing


def test_no_line_repeats_the_name_of_its_file():
    belonging = Belonging()
    repeated = [t for t in belonging.tested if belonging.lines(t) == [belonging.named(t)]]
    assert not repeated, repeated


def test_every_file_with_a_function_has_tests():
    """Tests of a whole top-level folder do not count."""
    tested = {path for paths in Belonging().tested.values() for path in paths}
    folders = tuple(path for path in tested if path.endswith("/") and path.count("/") > 2)
    without = [
        name
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in tested
        if not name.startswith(folders) and _has_function(path)
    ]
    assert not without, without


def _has_function(path: pathlib.Path) -> bool:
    """Returns whether a file has a function that does something; those of protocols do not."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        isinstance(node, functions) and not all(map(_is_text, node.body))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )


def _is_text(statement: ast.stmt) -> bool:
    """Returns whether a statement is a docstring or `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
