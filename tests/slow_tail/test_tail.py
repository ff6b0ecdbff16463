# tests: /tests/slow_tail/, /tests/conftest.py
"""Tests the list of tests that are slow by measurement."""

import re
import subprocess
import sys

from tests.belonging import ROOT
from tests.slow_tail import tail


def test_the_fastest_test_of_a_file_is_never_slow():
    seconds = {
        "tests/a/test_a.py::test_one": 9.0,
        "tests/a/test_a.py::test_two[x@y]": 0.1,
        "tests/a/test_a.py::test_three": 1.4,
        "tests/test_words.py::test_one": 7.0,
        "tests/test_words.py::test_two": 0.1,
        "tests/a/test_b.py::test_one": 5.0,
        "tests/a/test_b.py::test_two": 6.0,
    }
    found = tail.chosen(seconds)
    assert found == ["tests/a/test_a.py::test_one", "tests/a/test_b.py::test_two"]


def test_each_test_of_the_list_exists():
    for name in tail.listed():
        file, *classes, function = name.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        # Classes may be made, and absl makes names of cases.
        assert classes or re.search(rf"^def {function}\b", text, re.MULTILINE), name


def test_listed_tests_have_the_mark():
    name = min(tail.listed())
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 deselected" in found.stdout, found.stdout
