"""Modules of the user: imported, missing, or failing with the line that is wrong."""

import sys

import pytest

from lingvo_gshard.core.config import registry


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns a function that writes a module and returns its file."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        file = tmp_path / "of_the_user.py"
        file.write_text(text)
        return file

    yield write
    sys.modules.pop("of_the_user", None)


def test_a_module_is_returned(module):
    module("size = 3\n")
    assert registry.import_module("of_the_user").size == 3


@pytest.mark.parametrize("name", ["of_nobody", "of_nobody.inner", "os.of_nobody"])
def test_a_module_that_is_not_there_is_missing(name):
    with pytest.raises(ModuleNotFoundError):
        registry.import_module(name)


@pytest.mark.parametrize(
    "text, line, error",
    [
        ("import os\ndef f(:\n", 2, "SyntaxError: invalid syntax"),
        ("import of_nobody\n", 1, "ModuleNotFoundError: No module named 'of_nobody'"),
        ("import json\n\njson.loads('')\n", 3, "JSONDecodeError: Expecting value: line 1 .*"),
        ("from lingvo_gshard import einsumm\n", 1, "ImportError: .*"),
        ("raise RuntimeError\n", 1, "RuntimeError"),
        ("raise SystemExit(3)\n", 1, r"it ends the program \(exit code 3\)"),
    ],
)
def test_the_line_of_the_user_that_fails_is_named(module, text, line, error):
    file = module(text)
    expected = f"^the module of_the_user cannot be imported: {file}:{line}: {error}$"
    with pytest.raises(ValueError, match=expected):
        registry.import_module("of_the_user")
