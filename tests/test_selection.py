# tests: /tests/selection.py, /tests/conftest.py
"""Tests the options of pytest that select tests, on a small folder of tests."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import selection
from tests.belonging import ROOT

CONFTEST = """
from tests import selection

def pytest_addoption(parser):
    selection.add_options(parser)

def pytest_configure(config):
    selection.register(config)
"""
SETTINGS = """
[pytest]
addopts = -m "not slow"
markers = slow
"""
CASES = """
import pytest

def test_fast():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_slow(number):
    assert number != 4
"""
SLOW = {f"test_cases.py::test_slow[{number}]" for number in range(6)}


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with one fast test and six slow ones. One of these fails."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def _run(folder: pathlib.Path, *options: str) -> tuple[int, str, set[str]]:
    """Returns pytest's exit code, its output, and the names of the tests that it ran."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split() for line in ended.stdout.splitlines()]
    ran = {words[0] for words in lines if words[1:2] in (["PASSED"], ["FAILED"])}
    return ended.returncode, ended.stdout + ended.stderr, ran


def test_shares_have_each_slow_test_once(folder):
    found: list[str] = []
    for index in range(2):
        code, output, ran = _run(folder, f"--slow-share={index}/2")
        assert "test_cases.py::test_fast" in ran
        found += ran & SLOW
        fails = "test_cases.py::test_slow[4]" in ran
        assert code == (1 if fails else 0), output
        assert (f"slow tests of share {index} of 2 failed" in output) == fails
    assert sorted(found) == sorted(SLOW)


def test_slow_tests_of_a_share_run_alone_if_asked_for(folder):
    _, _, ran = _run(folder, "--slow-share=0/1", "-m", "slow")
    assert ran == SLOW


def test_slow_tests_begin_only_within_their_minutes(folder):
    code, output, ran = _run(folder, "--slow-share=0/1", "--slow-minutes=0")
    assert code == 0 and ran == {"test_cases.py::test_fast"}
    assert "6 slow tests had not begun after 0 minutes" in output
    _, output, ran = _run(folder, "--slow-share=0/1", "--slow-minutes=60")
    assert ran > SLOW and "had not begun" not in output


@pytest.mark.parametrize("share", ["3/3", "1", "a/b", "-1/2", "1/2/3", "/2"])
def test_a_share_must_be_one_of_n(share):
    with pytest.raises(pytest.UsageError, match=f"--slow-share={share}: expected K/N"):
        selection.read_share(share)
    assert selection.read_share("2/3") == (2, 3)


def test_only_files_that_belong_are_collected(folder):
    """The folder is no part of the repository, so that none of its tests belongs to a file."""
    code, output, ran = _run(folder, f"--belongs-to={ROOT}/LICENSE {ROOT}/tests/selection.py")
    assert code == pytest.ExitCode.OK and not ran
    # This file, and tests of all files.
    assert re.search(r"^[2-5] test files belong to 2 files$", output, re.MULTILINE)
    assert "no tests belong to LICENSE" in output


def test_unknown_files_are_refused(folder):
    code, output, _ = _run(folder, f"--belongs-to={ROOT}/lingvo_gshard/layer")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"--belongs-to: {ROOT}/lingvo_gshard/layer is no file or folder" in output
