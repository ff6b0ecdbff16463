# tests: keras/fitting.py, keras/mesh_state.py, /docs/keras.md
"""Trains a Keras model in several processes, with the program of docs/keras.md."""

import ast
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```py\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
PORT, HOSTS, DEVICES = "localhost:8476", "num_processes=2", '"jax_num_cpu_devices", 4'


def train(folder, processes, epochs):
    """Runs the page's program in a number of processes; returns the losses that each prints."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    text = PROGRAM.replace(PORT, f"localhost:{port}")
    text = text.replace(HOSTS, f"num_processes={processes}")
    text = text.replace(DEVICES, f'"jax_num_cpu_devices", {8 // processes}')
    (folder / "hosts.py").write_text(text, encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, "hosts.py", str(process), str(epochs)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, outputs, strict=True):
        assert process.returncode == 0, error
    return [ast.literal_eval(out.splitlines()[-1]) for out, _ in outputs]


def test_the_program_of_the_page_says_what_the_test_replaces():
    assert all(PROGRAM.count(text) == 1 for text in (PORT, HOSTS, DEVICES))


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "resumed")]
    for folder in folders:
        folder.mkdir()
    (one,) = train(folders[0], processes=1, epochs=3)
    two = train(folders[1], processes=2, epochs=3)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    assert len(one) == 3 and one[-1] < one[0]
    train(folders[2], processes=2, epochs=1)
    resumed = train(folders[2], processes=2, epochs=3)
    assert resumed[0] == resumed[1] == two[0][1:]
    # One process goes on where two have stopped.
    (more,) = train(folders[2], processes=1, epochs=4)
    assert len(more) == 1 and more[0] < two[0][-1]
