# tests: /docs/data.md, wings/object_stores/problems.py, training/run/checkpoint/orbax_storage.py
"""Runs the commands of docs/data.md against emulators."""

import os
import subprocess

import pytest

from tests.object_stores.emulators import environment_with
from tests.test_docs import ROOT, commands, environment, with_tiny_flags  # noqa: F401

_PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_of_the_page_run(environment, emulator, tmp_path):  # noqa: F811
    ours = [c for c in commands(_PAGE) if f"{emulator.scheme}://my-bucket/" in c]
    assert ours
    for command in ours:
        small = with_tiny_flags(command.replace("my-bucket", emulator.bucket.partition("://")[2]))
        small = small.replace("--steps=3000", "")
        if command.startswith("gshard-evaluate"):
            small += " --languages=gl --beam_size=1"
        result = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", small],
            cwd=tmp_path,
            env={**environment, **environment_with(emulator), "PATH": environment["PATH"]},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, f"$ {command}\n{result.stdout}\n{result.stderr}"
    assert os.path.getsize(tmp_path / "report.html") > 10_000


def test_the_page_names_the_settings_that_there_are():
    from lingvo_gshard.training.run.checkpoint.orbax_storage import COMMIT_MARKER
    from lingvo_gshard.wings.object_stores.problems import LIMIT

    assert f"`{LIMIT}`" in _PAGE and f"`{COMMIT_MARKER}`" in _PAGE
