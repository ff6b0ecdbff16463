# tests: tools/console/launcher.py
"""Tests that a module in lingvo_gshard/tools and an entry in setup.py add a command.

tests/test_architecture.py checks that both exist. The launcher finds the module by the name of the
console script and adds --version, an entry in the list of commands, and one-line errors.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import lingvo_gshard

ROOT = pathlib.Path(__file__).resolve().parents[2]

TOOL = '''\
"""Greets by name.

    gshard-greet --name=Ada
"""

from absl import flags

from lingvo_gshard.tools.console import startup


def main(argv):
    values = flags.FlagValues()
    flags.DEFINE_string("name", "you", "Who is greeted.", flag_values=values)
    startup.parse_flags(values, argv, __doc__)
    print(f"Hello {values.name}")
    return 3
'''

# Imitates an installed package with the tool, and its console script.
SCRIPT = """
import sys
from lingvo_gshard import tools
from lingvo_gshard.tools.console import launcher
tools.__path__.append({folder!r})
launcher.run_script() if sys.argv[0] == "gshard-greet" else launcher.run_module()
"""


@pytest.fixture
def greet(tmp_path):
    """Returns a function that runs the new command, or the package, with arguments."""
    (tmp_path / "greet.py").write_text(TOOL, encoding="utf-8")

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
        code = f"import sys; sys.argv[0] = {program!r}\n" + SCRIPT.format(folder=str(tmp_path))
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run


def test_the_command_runs_and_returns_its_exit_code(greet):
    result = greet("gshard-greet", "--name=Ada")
    assert (result.returncode, result.stdout) == (3, "Hello Ada\n"), result.stderr


def test_help_and_version_are_printed(greet):
    assert greet("gshard-greet", "--version").stdout == (
        f"gshard-greet {lingvo_gshard.__version__}\n"
    )
    text = greet("gshard-greet", "--help").stdout
    assert text.startswith("Greets by name.") and "--name=NAME" in text


def test_errors_are_one_line(greet):
    result = greet("gshard-greet", "--nam=Ada")
    assert result.returncode == 1
    assert result.stderr == (
        "gshard-greet: error: Unknown command line flag 'nam'. Did you mean: name ?\n"
    )


def test_the_package_lists_and_runs_the_command(greet):
    assert "  gshard-greet      Greets by name.\n" in greet("__main__.py").stdout
    assert greet("__main__.py", "greet").stdout == "Hello you\n"
