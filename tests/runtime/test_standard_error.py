"""Checks that standard error is captured, including C++ output before a process aborts."""

import os
import signal
import subprocess
import sys
import threading

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


def test_threads_that_redirect_at_once_leave_it_where_it_was(capfd):
    """Contexts of several threads overlap in any order, and none of them is nested in another."""
    before, rounds = os.stat(2), 25

    def redirect(number):
        for _ in range(rounds):
            if number % 4:
                with standard_error.hide():
                    os.write(2, b"of a library\n")
            else:
                with standard_error.capture(["of a library"]):
                    os.write(2, b"of a library\n")

    threads = [threading.Thread(target=redirect, args=(n,)) for n in range(8)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.path.samestat(before, os.stat(2))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_the_end_of_the_first_redirection_leaves_the_second(capfd):
    standard_error.hidden.clear()
    first, second = standard_error.hide(), standard_error.hide()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    os.write(2, b"hidden by the second\n")
    second.__exit__(None, None, None)
    os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"
    assert list(standard_error.hidden) == ["hidden by the second"]


OWN_LINES = """
import os, sys
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.tools.console import process_start
process_start.open_closed_streams()
with standard_error.hide():
    os.write(2, b"of a library\\n")
    print("of this program", file=sys.stderr, flush=True)
"""


def test_lines_of_the_program_are_shown_while_those_of_libraries_are_hidden():
    run = subprocess.run([sys.executable, "-c", OWN_LINES], capture_output=True, text=True)
    assert run.stderr == "of this program\n"
