"""Tests that Apache Beam gives the same bytes as processes, and the same errors."""

import os
import pathlib
import socket
import subprocess
import time

import pytest

from benchmarks.peer_python import find_python
from lingvo_gshard.wings.preparation import sources
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from tests.preparation import beam_run, raw

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def start_beam():
    """Returns a function that starts a process that prepares a source by Beam."""
    python = find_python(os.environ.get("BEAM_PYTHON"), ("apache_beam",))
    if python is None:
        pytest.skip("apache-beam is not installed, and BEAM_PYTHON names no Python with it")

    def start(directory, source, *options):
        command = [python, "-m", "tests.preparation.beam_run", directory, source, *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    return start


@pytest.fixture
def beam(start_beam):
    """Returns a function that prepares a source by Beam; it returns the exit code and stderr."""

    def run(directory, source, *options):
        process = start_beam(directory, source, *options)
        _, errors = process.communicate()
        return process.returncode, errors

    return run


def test_beam_gives_the_same_bytes(tmp_path, monkeypatch, beam):
    monkeypatch.setattr(sources, "PART_LINES", 100)
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(600) + raw.rows(50))
    prepare(tmp_path / "here", [path], PrepareOptions(beam_run.params(tmp_path), 1))
    code, errors = beam(tmp_path, path)
    assert code == 0, errors
    assert raw.digests(tmp_path / "beam") == raw.digests(tmp_path / "here")


def test_a_bad_row_is_refused_or_skipped(tmp_path, beam):
    path = tmp_path / "pairs.tsv"
    raw.write_tsv(path, [*raw.rows(300), ("de", "ein")])
    code, errors = beam(tmp_path, path)
    assert code == 1
    assert errors.splitlines()[-1].startswith(f"{path}:301: wrong number of columns: ")
    code, errors = beam(tmp_path, path, "--on_bad_row=skip")
    assert code == 0, errors
    assert len(raw.texts(tmp_path / "beam")) == 300


def test_an_unknown_runner_is_refused(tmp_path, beam):
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(10))
    code, errors = beam(tmp_path, path, "--runner=FlinkRuner")
    assert code == 1
    assert errors.splitlines()[-1].startswith("`beam`: Unexpected pipeline runner: FlinkRuner")


@pytest.fixture
def dask(tmp_path):
    """Yields the address of a Dask scheduler, and the processes of its three workers."""
    python = find_python(os.environ.get("BEAM_PYTHON"), ("apache_beam", "distributed"))
    if python is None:
        pytest.skip("Dask is not installed, and BEAM_PYTHON names no Python with it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def start(kind, *options):
        command = [python, "-m", "dask", kind, *options, "--no-dashboard"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    scheduler = start("scheduler", "--host=127.0.0.1", f"--port={address.rpartition(':')[2]}")
    workers = [start("worker", address, "--no-nanny", "--nthreads=1") for _ in range(3)]
    yield address, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


def test_a_lost_worker_of_dask_changes_nothing(tmp_path, dask, start_beam):
    """Workers are other processes, so that files are many: each is a task of its own."""
    for number in range(12):
        raw.write_tsv(tmp_path / f"pairs{number:02}.tsv", raw.rows(200, seed=number))
    source = str(tmp_path / "pairs*.tsv")
    prepare(tmp_path / "here", [source], PrepareOptions(beam_run.params(tmp_path), 1))
    address, workers = dask
    runner = "--runner=apache_beam.runners.dask.dask_runner.DaskRunner"
    options = (runner, f"--dask_client_address={address}", "--dask_partition_size=1")
    process = start_beam(tmp_path, source, *options)
    while process.poll() is None and len(list((tmp_path / "beam").rglob("*.json"))) < 6:
        time.sleep(0.01)
    workers[0].kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert raw.digests(tmp_path / "beam") == raw.digests(tmp_path / "here")
