"""Tests that output whose reader goes away calls back once and raises nothing."""

import errno
import io
import os

import pytest
import rich.console

from lingvo_gshard.api.closed_output import GuardedStream


def test_closed_pipe_calls_back_once_and_discards_what_follows():
    reader, writer = os.pipe()
    calls = []
    with open(writer, "w") as stream:
        guarded = GuardedStream(stream, lambda: calls.append("closed"))
        console = rich.console.Console(file=guarded)
        console.print("read")
        assert os.read(reader, 100) == b"read\n" and not calls
        os.close(reader)
        for _ in range(3):
            console.print("lost")
        assert calls == ["closed"]
    assert calls == ["closed"]


@pytest.mark.parametrize(("number", "is_closed"), [(errno.EIO, True), (errno.ENOSPC, False)])
def test_closed_terminal_calls_back_and_a_full_disk_does_not(number, is_closed):
    class Failing(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    calls = []
    stream = GuardedStream(Failing(), lambda: calls.append("closed"))
    assert stream.write("four") == 4
    assert bool(calls) == is_closed
    assert stream.getvalue() == ""


def test_callback_may_raise():
    def stop():
        raise KeyboardInterrupt

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, pytest.raises(KeyboardInterrupt):
        print("lost", file=GuardedStream(stream, stop), flush=True)
