"""Checks what keeps a host out after failures, with checks that the test makes up."""

import json
import sys
import time

import pytest

from lingvo_gshard.wings.agents import health
from lingvo_gshard.wings.agents.health import HealthCheck

_FOUND = {"checks": [{"name": "product", "state": "failure", "found": "differs by 1e-1"}]}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def check():
    """Makes checks whose command is a Python text; its argument is the file to write."""
    made = []

    def make(text: str):
        said, clock = [], Clock()

        def command(path: str) -> list[str]:
            return [sys.executable, "-S", "-c", text, path]

        made.append(HealthCheck(command, said.append, lambda: None, clock))
        return made[-1], said, clock

    yield make
    for one in made:
        one.close()


def end(one: HealthCheck, said: list[str]) -> str:
    deadline = time.monotonic() + 30
    while not said:
        one.poll()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return said.pop()


def test_a_host_takes_part_again_after_a_check_without_failures(check):
    one, said, _ = check("pass")
    assert not one.keeps_out
    one.begin()
    assert one.keeps_out
    assert "takes part again" in end(one, said)
    assert not one.keeps_out


def test_a_failure_keeps_the_host_out_until_a_later_check_finds_none(check, tmp_path):
    mark = tmp_path / "repaired"
    text = (
        "import pathlib, sys;"
        f"pathlib.Path(sys.argv[1]).write_text('''{json.dumps(_FOUND)}''');"
        f"sys.exit(0 if pathlib.Path({str(mark)!r}).exists() else 1)"
    )
    one, said, clock = check(text)
    one.begin()
    assert "finds: product: differs by 1e-1" in end(one, said)
    assert one.keeps_out
    mark.touch()
    one.poll()
    assert one.keeps_out and not said
    clock.now = health._AGAIN_SECONDS + 1
    assert "takes part again" in end(one, said)
    assert not one.keeps_out


def test_a_check_that_hangs_keeps_the_host_out(check):
    one, said, clock = check("import time; time.sleep(1000)")
    one.begin()
    one.poll()
    assert one.keeps_out and not said
    clock.now = health._LONGEST + 1
    assert "does not end within 600 s" in end(one, said)
    assert one.keeps_out


def test_a_check_that_cannot_run_keeps_the_host_out(check):
    one, said, _ = check("raise SystemExit(3)")
    one.begin()
    assert "ends with code 3" in end(one, said)
    assert one.keeps_out
