# tests: wings/serving/planning/process.py, wings/serving/planning/worker.py
"""Breaks plans of a real server over HTTP: each is told on its page, and later plans work."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.open_models.published import CONFIG

SMALL = {"config": "llama", "topology": "cpu:2", "mesh": "data=2", "batch_rows": 8, "length": 32}


@pytest.fixture
def address(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "lingvo_gshard", "plan", "--serve", "--port=0"]
    flags = [f"--port_file={port_file}", f"--configs={tmp_path}", "--compilation_cache="]
    process = subprocess.Popen([*command, *flags, "--plan_seconds=300", "--plan_gib=4"])
    try:
        while not port_file.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}/api/plans", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def asked(url, content=None):
    """Returns the status and the JSON of an answer."""
    request = urllib.request.Request(url, content)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def submitted(url, **fields):
    status, found = asked(url, json.dumps({**SMALL, **fields}).encode())
    assert status == 200, found
    return f"{url}/{found['id']}"


def until(url, *states):
    while (found := asked(url)[1])["state"] not in states:
        time.sleep(0.05)
    return found


def workers(server):
    """Returns the processes that a server has started, by what they run."""
    threads = pathlib.Path(f"/proc/{server}/task").iterdir()
    found = [pid for each in threads for pid in (each / "children").read_text().split()]
    return [
        int(pid) for pid in found if b"worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_breaks_the_plans_of_others(address):
    url, server = address
    for topology in ("gpu:h100:1000000000x8", "v5p:8x8x8*1000000"):
        status, found = asked(url, json.dumps({**SMALL, "topology": topology}).encode())
        assert status == 400 and f"`topology={topology}` has" in found["error"]["message"]
    nested = b'{"topology":"cpu:2","content":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    for content in (
        b"{",
        b"[]",
        b"\xff" * 99,
        nested,
        json.dumps({**SMALL, "batch_rows": -1}).encode(),
    ):
        assert asked(url, content)[0] == 400
    killed, waiting = submitted(url), submitted(url, batch_rows=16)
    until(killed, "running")
    while not workers(server):
        time.sleep(0.01)
    (worker,) = workers(server)
    os.kill(worker, signal.SIGKILL)
    problem = until(killed, "failed")["problem"]
    assert "ended by SIGKILL" in problem and "Other plans go on; ask again" in problem
    assert until(waiting, "done", "failed")["problem"] == ""
    huge = submitted(url, batch_rows=10**9, length=10**6)
    assert until(huge, "done", "failed")["state"] == "failed"
    assert until(submitted(url), "done", "failed")["problem"] == ""
