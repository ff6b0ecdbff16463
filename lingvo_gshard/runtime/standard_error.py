"""Standard error, read while a library in C++ writes to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

# Keeps everything in a file, and shows what has none of the words. It is a process of its own so
# that what is written last is shown, too, when this one aborts. The colon: no line left is fine.
_KEEP = 'file=$1; shift; tee "$file" | grep -v -F "$@" >&2; :'
_PATIENCE_SECONDS = 10


class Kept:
    """What was written to standard error, complete when its context has been left."""

    text = ""


@contextlib.contextmanager
def kept(hidden: Sequence[str]) -> Iterator[Kept]:
    """Within it, whatever this process writes to standard error is kept, and shown as well.

    hidden: lines with any of these words are kept and not shown.
    """
    result = Kept()
    words = [argument for word in hidden for argument in ("-e", word)]
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.NamedTemporaryFile() as file:
        # In a session of its own, so that Ctrl-C does not end it before this process.
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEP, "sh", file.name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.dup2(keeper.stdin.fileno(), 2)
        keeper.stdin.close()
        try:
            yield result
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            # A process started meanwhile may hold on to the pipe.
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(_PATIENCE_SECONDS)
            result.text = file.read().decode(errors="replace")
