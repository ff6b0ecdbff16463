"""Tests `python -m lingvo_gshard` and the entry point of every command."""

import pathlib
import subprocess
import sys

import pytest

import lingvo_gshard
from lingvo_gshard.tools.console import launcher

ROOT = pathlib.Path(__file__).resolve().parents[3]
WITHOUT_LIBRARIES = """
import sys
sys.modules["tensorflow"] = sys.modules["jax"] = None
from lingvo_gshard.tools.console import launcher
sys.argv = {argv}
launcher.{entry}()
"""


def run(entry: str, *argv: str) -> subprocess.CompletedProcess:
    """Runs an entry point in a subprocess without TensorFlow and jax."""
    code = WITHOUT_LIBRARIES.format(argv=list(argv), entry=entry)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("tool", ["train", "plan"])
def test_a_command_prints_its_version(tool):
    result = run("run_script", f"/usr/bin/gshard-{tool}", "--version")
    assert result.stdout == f"gshard-{tool} {lingvo_gshard.__version__}\n", result.stderr


def test_the_package_prints_its_version():
    result = run("run_module", "__main__.py", "--version")
    assert result.stdout == f"lingvo_gshard {lingvo_gshard.__version__}\n", result.stderr


def test_the_package_lists_its_commands():
    result = run("run_module", "__main__.py")
    assert result.returncode == 0, result.stderr
    for tool in launcher.tool_names():
        assert f"  gshard-{tool} " in result.stdout


def test_unknown_command_suggests_the_nearest():
    result = run("run_module", "__main__.py", "trian")
    assert result.returncode == 1
    assert result.stderr == (
        "lingvo_gshard: error: unknown command 'trian'. Did you mean 'train'?\n"
    )
