"""Starts modules of this package in processes of their own, which answer on standard output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import IO


def start_module(
    module: str, *arguments: str, stderr: int | IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Starts a module in a new process, with pipes for its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Modules of the user are found where this process finds them.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C is for the parent, whose end the module notices.
        process_group=0,
    )


def end_with_parent() -> None:
    """Ends this process when standard input ends, because the parent is gone.

    Call it when all that comes on standard input was read.
    """

    def wait() -> None:
        # Without the stream's lock, which Python takes at its end.
        while os.read(0, 2**16):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def answer_stream() -> IO[bytes]:
    """Returns the stream to the parent. What libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return answers
