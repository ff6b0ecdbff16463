"""Captures standard error, which libraries in C++ write to directly."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

# Copies everything to a file, and shows lines without the hidden words. A separate process still
# shows the last lines if this one aborts. The colon ignores the exit code of grep.
_COPY = 'file=$1; shift; tee "$file" | grep -v -F "$@" >&2; :'
_WAIT_SECONDS = 10

# The last messages of libraries that were hidden.
hidden: collections.deque[str] = collections.deque(maxlen=100)


class Captured:
    """Captured output.

    Attributes:
      text: everything that was written; set when the context ends.
    """

    text = ""


@contextlib.contextmanager
def hide() -> Iterator[None]:
    """Hides what libraries write to standard error inside the context; shows it if that fails.

    It is kept in `hidden`. Nothing is hidden where TF_CPP_MIN_LOG_LEVEL asks for all messages.
    """
    if shows_everything():
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            messages.seek(0)
            os.write(screen, messages.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)
        messages.seek(0)
        text = messages.read().decode(errors="replace").strip()
        if text:
            hidden.append(text)


def shows_everything() -> bool:
    """Returns whether TF_CPP_MIN_LOG_LEVEL asks for warnings of libraries, by 0 or 1."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1")


@contextlib.contextmanager
def capture(hidden: Sequence[str]) -> Iterator[Captured]:
    """Captures what this process writes to standard error inside the context, and shows it.

    Args:
      hidden: lines that contain one of these are captured but not shown.
    """
    result = Captured()
    words = [argument for word in hidden for argument in ("-e", word)]
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.NamedTemporaryFile() as file:
        # A session of its own protects it from Ctrl-C, so that it outlives this process.
        copier = subprocess.Popen(
            ["sh", "-c", _COPY, "sh", file.name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.dup2(copier.stdin.fileno(), 2)
        copier.stdin.close()
        try:
            yield result
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            # A process that was started inside the context may hold the pipe open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                copier.wait(_WAIT_SECONDS)
            result.text = file.read().decode(errors="replace")
