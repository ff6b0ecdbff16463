"""Tests that Apache Beam gives the same bytes as processes, and the same errors."""

import os
import pathlib
import subprocess

import pytest

from benchmarks.peer_python import find_python
from lingvo_gshard.wings.preparation import sources
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from tests.preparation import beam_run, raw

ROOT = pathlib.Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture
def beam():
    """Returns a function that prepares a source by Beam, in a process with the package."""
    python = find_python(os.environ.get("BEAM_PYTHON"), ("apache_beam",))
    if python is None:
        pytest.skip("apache-beam is not installed, and BEAM_PYTHON names no Python with it")

    def run(directory, source, on_bad_row="refuse"):
        command = [python, "-m", "tests.preparation.beam_run", directory, source, on_bad_row]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)

    return run


def test_beam_gives_the_same_bytes(tmp_path, monkeypatch, beam):
    monkeypatch.setattr(sources, "PART_LINES", 100)
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(600) + raw.rows(50))
    prepare(tmp_path / "here", [path], PrepareOptions(beam_run.params(tmp_path), 1))
    done = beam(tmp_path, path)
    assert done.returncode == 0, done.stderr
    assert raw.digests(tmp_path / "beam") == raw.digests(tmp_path / "here")


def test_a_bad_row_is_refused_or_skipped(tmp_path, beam):
    path = tmp_path / "pairs.tsv"
    raw.write_tsv(path, [*raw.rows(300), ("de", "ein")])
    done = beam(tmp_path, path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"{path}:301: wrong number of columns: ")
    done = beam(tmp_path, path, "skip")
    assert done.returncode == 0, done.stderr
    assert len(raw.texts(tmp_path / "beam")) == 300
