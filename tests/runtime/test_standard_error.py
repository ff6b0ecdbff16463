"""Checks that standard error is captured, including C++ output before a process aborts."""

import os
import signal
import subprocess
import sys

import pytest

from lingvo_gshard.runtime import standard_error

LAST_WORDS = """
import os
from lingvo_gshard.runtime import standard_error
with standard_error.capture(["hidden"]):
    os.write(2, b"a hidden line\\nlast words\\n")
    os.{end}
"""


def test_capture_returns_everything_and_filters_hidden_lines(capfd):
    with standard_error.capture(["wolf", "f.x"]) as output:
        os.write(2, b"a sheep\nthe wolf says\nfox f.x\nfax\nno end")
    assert output.text == "a sheep\nthe wolf says\nfox f.x\nfax\nno end"
    assert capfd.readouterr().err == "a sheep\nfax\nno end\n"
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_capture_of_no_output_is_empty(capfd):
    with standard_error.capture(["x"]) as output:
        pass
    assert output.text == "" and capfd.readouterr() == ("", "")


def test_standard_error_is_restored_after_an_error(capfd):
    with pytest.raises(KeyError), standard_error.capture(["x"]) as output:
        os.write(2, b"before\nx\n")
        raise KeyError
    assert output.text == "before\nx\n"
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"


@pytest.mark.parametrize(("end", "code"), [("abort()", -signal.SIGABRT), ("_exit(3)", 3)])
def test_shows_the_last_lines_of_a_process_that_aborts(end, code):
    run = subprocess.run(
        [sys.executable, "-c", LAST_WORDS.format(end=end)], capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (code, "last words\n")
