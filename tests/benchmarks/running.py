"""Runs the benchmarks as a user does."""

from benchmarks import __main__ as benchmarks
from lingvo_gshard.tools.console import startup


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    code = startup.guarded(benchmarks.NAME, benchmarks.main)([benchmarks.NAME, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
