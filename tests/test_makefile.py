# tests: /Makefile
"""Tests the commands of the Makefile's targets by `make -n`."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

EXPECTED = {
    "quickstart": [
        "bin/gshard-train --experiment=translation.quickstart --logdir=runs/quickstart",
        "bin/gshard-evaluate --logdir=runs/quickstart",
        "bin/gshard-translate --logdir=runs/quickstart",
    ],
    "install": ["pip install", "-c constraints.txt -e ."],
    "lint": ["ruff check .", "ruff format --check ."],
    "test": ["ruff check .", "ruff format --check .", "pytest -n 2 --dist loadgroup"],
    "test-slow": ["pytest -n 2 --dist loadgroup -m slow --failed-first --slow-share="],
    "test-all": ["ruff check .", "pytest -n 2 --dist loadgroup", "-m slow $file"],
    "docs": ["bin/python -m docs.site build/site_source", "bin/mkdocs build --quiet --strict"],
    "pictures": ["bin/python -m docs.pictures"],
    "soak": ["bin/python -m tests.soak --seed=0 --faults=200"],
    "soak-serve": ["bin/python -m tests.serving.soak --seed=0"],
    "soak-cluster": ["bin/python -m tests.agents.soak --seed=0"],
    "bazel-test": ["bazel test", "//tests/..."],
}


def _make(*arguments: str) -> str:
    """Returns the output of make for a missing environment, without flags of an outer make."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    return subprocess.run(
        ["make", "--no-print-directory", "VENV=not_made_yet", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.parametrize("target", EXPECTED)
def test_targets_run_their_commands_in_order(target):
    text, position = _make("-n", target), 0
    for command in EXPECTED[target]:
        assert command in text[position:], f"{command} in\n{text}"
        position = text.index(command, position)


def test_help_lists_every_target():
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    described = set(re.findall(r"^make ([\w-]+)", _make("help"), re.MULTILINE))
    assert described == set(declared.group(1).split()) - {"help"}


def test_variables_select_tests():
    text = _make("-n", "test", "FILES=lingvo_gshard/layers tests/tiny.py")
    selection = '--belongs-to="lingvo_gshard/layers tests/tiny.py"'
    assert f"pytest -n 2 --dist loadgroup $part {selection} " in " ".join(text.split())
    assert 'for part in "";' in text
    assert '--changed-since="main"' in _make("-n", "test", "CHANGED=main")
    assert "--belongs-to" not in _make("-n", "test") and "--slow" not in _make("-n", "test")


def test_shares_of_slow_tests_follow_the_commits():
    text = _make("-n", "test-slow", "SHARE=3/200", "MINUTES=10")
    assert "--slow-share=3/200 --slow-minutes=10" in text
    text = _make("-n", "test-slow", "SHARE=0/1", "CHANGED=main")
    assert '--slow-share=0/1 --changed-since="main"' in " ".join(text.split())
    (index, count) = re.search(r"--slow-share=(\d+)/(\d+)", _make("-n", "test-slow")).groups()
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    assert int(index) == int(counted.stdout or 0) % int(count)
    assert "--slow-minutes" not in _make("-n", "test-slow")


def test_parts_are_all_tests():
    """A folder of tests is in one part, or in the last part, which leaves out what others run."""
    (parts,) = re.findall(r"for part in (.*?);", _make("-n", "test"))
    first, second, others = (part.split() for part in re.findall(r'"(.*?)"', parts))
    assert others == ["tests", *(f"--ignore={folder}" for folder in first + second)]
    assert all((ROOT / folder).is_dir() for folder in first + second)
    assert len({*first, *second}) == len(first) + len(second)


def test_a_release_needs_a_version():
    text = _make("-n", "release", "VERSION=0.2.0")
    assert "bin/python -m docs.release 0.2.0" in text and '-e ".[dev]"' in text
    for arguments in ((), ("VERSION=",)):
        assert _make("-n", "release", *arguments) == "python3 -m docs.release\n"


def test_variables_choose_environment_and_folder():
    text = _make("-n", "quickstart", "VENV=elsewhere", "LOGDIR=there", "PYTHON=python3.99")
    assert "elsewhere/bin/gshard-train" in text and "--logdir=there" in text
    assert "python3.99 -m venv elsewhere" in text
