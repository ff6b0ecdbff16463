"""Runs every case: the exit code, the one sentence, and nothing lost."""

import importlib
import pkgutil
import re

import pytest

from tests.hard_knocks import cases, processes
from tests.hard_knocks.case import CLOSED, Case
from tests.hard_knocks.launch import Launch
from tests.hard_knocks.sandbox import Sandbox, differences

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
    for step in case.given:
        step(sandbox)
    before = sandbox.files()
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
    paths = [sandbox.outside(name) for name in ("stdin", "stdout", "stderr")]
    for path in paths:
        path.touch()
    if isinstance(case.stdin, bytes):
        paths[0].write_bytes(case.stdin)
    streams = (case.stdin, case.stdout, case.stderr)
    launch = Launch(
        arguments=processes.arguments_of(case.command, sandbox.outside("")),
        directory=str(sandbox.path),
        environment=processes.environment(
            **{"XDG_CACHE_HOME": str(sandbox.outside("cache")), **case.environment}
        ),
        streams=[_stream(own, str(path)) for own, path in zip(streams, paths, strict=True)],
        limits=dict(case.limits),
    )
    starter = processes.NewInterpreters() if case.new_process else zygote
    code = starter.wait(starter.start(launch), case.seconds)
    printed, said = (path.read_text(encoding="utf-8", errors="replace") for path in paths[1:])
    return code, printed, said


def _stream(own: bytes | str | None, default: str) -> str | None:
    """Returns the path of a standard stream, or None if it is closed."""
    if own == CLOSED:
        return None
    return own if isinstance(own, str) else default


def _pattern(text: str) -> str:
    """Returns a regular expression for text in which "..." stands for any text."""
    return "(?s:.*)".join(map(re.escape, text.split("...")))
