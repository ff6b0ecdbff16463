# tests: wings/serving/planning/process.py, tools/serve.py, wings/serving/server.py
"""Runs gshard-serve as a process: it answers, drains at SIGTERM, and ends with 0."""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.data import corpora

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serving")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = [row.source for row in corpora.rows(40)]


@pytest.fixture
def server(trained_logdir, tmp_path):
    """Returns a running server and its port."""
    port_file = tmp_path / "port.txt"
    command = [sys.executable, "-m", "lingvo_gshard", "serve", f"--logdir={trained_logdir}"]
    command += ["--port=0", f"--port_file={port_file}", "--nowarm_up", "--drain_seconds=300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not port_file.exists() or not port_file.read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    yield process, int(port_file.read_text())
    process.kill()
    process.wait()


def connect(port):
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            connection.connect()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return connection
    raise AssertionError("the server does not listen")


def test_requests_under_way_are_answered_after_sigterm(server):
    process, port = server
    body = json.dumps({"text": SOURCES, "beam_size": 1}).encode()
    connection = connect(port)
    # The first request compiles, so that it is under way for a while.
    connection.request("POST", "/v1/translate", body)
    health = connect(port)
    health.request("GET", "/healthz")
    while json.load(health.getresponse())["texts_under_way"] < len(SOURCES):
        health.request("GET", "/healthz")
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: accepting no more; 1 requests under way" in _line_with(process, "SIGTERM")
    with pytest.raises(ConnectionError):
        for _ in range(100):
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
            time.sleep(0.05)
    response = connection.getresponse()
    assert response.status == 200
    assert len(json.load(response)["translations"]) == len(SOURCES)
    assert process.wait(60) == 0


def test_a_client_that_leaves_in_mid_answer_leaves_nothing_behind(server):
    process, port = server
    connection = connect(port)
    connection.request("POST", "/v1/translate", json.dumps({"text": SOURCES}).encode())
    time.sleep(0.5)
    connection.close()
    health = connect(port)
    for _ in range(3000):
        health.request("GET", "/healthz")
        if json.load(health.getresponse())["texts_under_way"] == 0:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("texts are still under way")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_the_server_leaves_compiling_to_another_process(server):
    """So it needs neither TensorFlow nor the compiler's memory, and no process stays behind."""
    process, port = server
    connection = connect(port)
    connection.request("POST", "/v1/translate", json.dumps({"text": SOURCES[:2]}).encode())
    response = connection.getresponse()
    assert response.status == 200 and len(json.load(response)["translations"]) == 2
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    assert "jaxlib" in maps and "tensorflow" not in maps
    tasks = pathlib.Path(f"/proc/{process.pid}/task")
    children = " ".join(path.read_text() for path in tasks.glob("*/children")).split()
    process.kill()
    process.wait()
    for child in children:
        for _ in range(600):
            if not pathlib.Path(f"/proc/{child}").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"process {child} outlives the server")


def _line_with(process, text):
    return next(line for line in process.stderr if text in line)
