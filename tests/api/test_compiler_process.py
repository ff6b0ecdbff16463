# tests: api/decoding/compiler_process.py, api/decoding/compiler_main.py
# tests: wings/cluster/child_process.py
# tests: api/options.py
"""Tests that a compiler that hangs is replaced, and that it does not outlive its parent's end."""

import subprocess
import sys
import threading
import time

import pytest

from lingvo_gshard.api.decoding import compiler_process
from lingvo_gshard.api.decoding.compiler_process import CompilerProcess, _write
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.wings.inference.programs.executables import CompilerStuckError, ProgramKey

# Answers as the real one does, but hangs as often as a file has lines.
CHILD = """
import pathlib, sys, time
left = pathlib.Path(sys.argv[1])
sys.stdin.readline()
for line in sys.stdin:
    hangs = left.read_text().splitlines()
    left.write_text("".join(f"{one}\\n" for one in hangs[1:]))
    if hangs:
        time.sleep(1000)
    print("done", flush=True)
"""
KEY = ProgramKey("steps")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Returns a function that makes a compiler that hangs so often, and the processes it starts."""
    started = []

    def start(*_, **__):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path / "hangs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        return process

    monkeypatch.setattr(compiler_process, "start_module", start)
    made = []

    def make(hangs, seconds=1.0):
        (tmp_path / "hangs").write_text("hang\n" * hangs)
        made.append(CompilerProcess("run", RuntimeOptions(), "trained", "best", seconds))
        return made[-1], started

    yield make
    for one in made:
        one.close()
    assert all(process.poll() is not None for process in started)


def test_a_compiler_that_hangs_is_replaced(compiler, caplog):
    compile, started = compiler(hangs=1)
    compile(KEY)
    compile(KEY)
    assert len(started) == 2 and started[0].poll() is not None
    assert "The compiler was stuck for 1 s at steps, and is started anew" in caplog.text


def test_a_program_at_which_every_compiler_hangs_is_given_up(compiler):
    compile, started = compiler(hangs=2)
    with pytest.raises(CompilerStuckError, match="compiling steps took longer than 1 s"):
        compile(KEY)
    compile(KEY)
    assert len(started) == 3


def test_the_process_gives_way_only_while_requests_are_answered(compiler, monkeypatch):
    asked = []
    monkeypatch.setattr(
        compiler_process, "_write", lambda stream, value: asked.append(value) or _write(stream, 0)
    )
    compile, _ = compiler(hangs=0)
    serving = [False, True]
    compile._is_serving = lambda: serving.pop(0)
    compile(KEY)
    compile(KEY)
    assert asked[1:] == [(KEY, False), (KEY, True)]


def test_every_thread_gives_way():
    """In a process of its own, since niceness cannot be taken back."""
    code = """
import os, threading
from lingvo_gshard.api.decoding import compiler_main
threading.Thread(target=threading.Event().wait, daemon=True).start()
before = os.getpriority(os.PRIO_PROCESS, 0)
compiler_main._NICENESS = 19
compiler_main.give_way()
print(before < 19, {os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True {19}\n"


def test_a_compiler_is_stopped_while_it_hangs(compiler):
    compile, started = compiler(hangs=1, seconds=600.0)
    failures = []

    def ask():
        try:
            compile(KEY)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not started:
        time.sleep(0.01)
    compile.stop()
    thread.join(60)
    assert failures == ["the compiler was stopped"]
    with pytest.raises(RuntimeError, match="the compiler was stopped"):
        compile(KEY)
    assert len(started) == 1
