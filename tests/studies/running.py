"""Runs a study in this process."""

from lingvo_gshard.tools.console import startup
from studies import __main__ as studies


def run_study(capsys, *words):
    """Returns the exit code, output and errors of `python -m studies WORDS ...`."""
    capsys.readouterr()
    code = startup.guarded("studies", studies.main)(["studies", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
