# tests: tools/, tools/prepare.py
"""Runs every case: the exit code, the one sentence, and nothing lost."""

import contextlib
import importlib
import os
import pathlib
import pkgutil
import re
import signal
import time
from collections.abc import Iterator, Mapping

import pytest

from tests.hard_knocks import cases, processes
from tests.hard_knocks.case import CLOSED, Case
from tests.hard_knocks.launch import Launch
from tests.hard_knocks.sandbox import Sandbox, differences

# What a training prints after some steps.
_TRAINS = re.compile(r"^step [\d,]+/", re.MULTILINE)
# What no user should see, whatever a row's "..." stands for.
_NOISE = re.compile(
    r"Traceback|^[IWEF]\d{4} |^WARNING: |<[\w.]+ object at |<class '|lib/python3"
    r"|\.py:\d+(\]|: \w*Warning)",
    re.MULTILINE,
)


def _rows():
    """Yields all cases as parameters of the test."""
    for module in pkgutil.iter_modules(cases.__path__):
        for case in importlib.import_module(f"{cases.__name__}.{module.name}").CASES:
            marks = pytest.mark.slow if case.slow else ()
            yield pytest.param(case, id=f"{module.name}-{case.name}", marks=marks)


@pytest.mark.parametrize("case", _rows())
def test_hard_knock(case: Case, sandbox: Sandbox, zygote: processes.Zygote):
    if case.needs:
        pytest.importorskip(case.needs)
    for step in case.given:
        step(sandbox)
    before = sandbox.files()
    with _meanwhile(case, sandbox, zygote):
        code, printed, said = _run(case, sandbox, zygote)
    seen = f"\nexit code {code}\n{printed}\n{said}"
    assert code == case.exit_code, seen
    assert not _NOISE.search(said), seen
    if case.stderr is None:
        assert re.fullmatch(_pattern(case.standard_error), said), seen
    position = 0
    for text in case.prints:
        found = re.compile(_pattern(text)).search(printed, position)
        assert found, f"{text!r} is missing{seen}"
        position = found.end()
    lost = differences(before, sandbox.files(), case.changes)
    assert not lost, f"{lost}{seen}"
    for step in case.then:
        step(sandbox)


def _run(case: Case, sandbox: Sandbox, zygote: processes.Zygote) -> tuple[int, str, str]:
    """Runs a case's command. Returns its exit code, standard output and standard error."""
    paths = _stream_files(sandbox, "")
    if isinstance(case.stdin, bytes):
        paths[0].write_bytes(case.stdin)
    streams = (case.stdin, case.stdout, case.stderr)
    launch = _launch(
        case.command,
        sandbox,
        case.environment,
        [_stream(own, str(path)) for own, path in zip(streams, paths, strict=True)],
    )
    launch.limits = dict(case.limits)
    starter = processes.NewInterpreters() if case.new_process else zygote
    process = starter.start(launch)
    if case.signal:
        _await_text(paths[1], _TRAINS, case.seconds)
        os.kill(process, signal.Signals[case.signal])
    code = starter.wait(process, case.seconds)
    printed, said = (path.read_text(encoding="utf-8", errors="replace") for path in paths[1:])
    return code, printed, said


@contextlib.contextmanager
def _meanwhile(case: Case, sandbox: Sandbox, zygote: processes.Zygote) -> Iterator[None]:
    """Trains beside the case's command if it says so, and stops that training in order."""
    if not case.meanwhile:
        yield
        return
    paths = _stream_files(sandbox, "meanwhile.")
    process = zygote.start(_launch(case.meanwhile, sandbox, {}, list(map(str, paths))))
    try:
        _await_text(paths[1], _TRAINS, case.seconds)
        yield
        os.kill(process, signal.SIGTERM)
    finally:
        code = zygote.wait(process, case.seconds)
    assert code == 128 + signal.SIGTERM, paths[2].read_text(encoding="utf-8")


def _launch(
    command: str, sandbox: Sandbox, environment: Mapping[str, str], streams: list[str | None]
) -> Launch:
    return Launch(
        arguments=processes.arguments_of(command, sandbox.outside("")),
        directory=str(sandbox.path),
        environment=processes.environment(
            **{"XDG_CACHE_HOME": str(sandbox.outside("cache")), **environment}
        ),
        streams=streams,
        limits={},
    )


def _stream_files(sandbox: Sandbox, prefix: str) -> list[pathlib.Path]:
    """Returns empty files for the standard streams."""
    paths = [sandbox.outside(prefix + name) for name in ("stdin", "stdout", "stderr")]
    for path in paths:
        path.touch()
    return paths


def _await_text(path: pathlib.Path, text: re.Pattern[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not text.search(path.read_text(encoding="utf-8")):
        assert time.monotonic() < end, path.read_text(encoding="utf-8")[-2000:]
        time.sleep(0.01)


def _stream(own: bytes | str | None, default: str) -> str | None:
    """Returns the path of a standard stream, or None if it is closed."""
    if own == CLOSED:
        return None
    return own if isinstance(own, str) else default


def _pattern(text: str) -> str:
    """Returns a regular expression for text in which "..." stands for any text."""
    return "(?s:.*)".join(map(re.escape, text.split("...")))
