"""Redirects standard error, which libraries in C++ write to directly.

Descriptor 2 belongs to the whole process, and several threads may want to redirect it at once.
Only `_Descriptor` changes the descriptor. The latest redirection that has not ended determines the
target. After the end of all redirections the descriptor is the screen again.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
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


class _Descriptor:
    """The owner of descriptor 2, which threads may redirect at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        # A copy of the descriptor as it was before all redirections; None without any.
        self._screen: int | None = None
        # Copies of the descriptors that it was redirected to, the latest last.
        self._targets: list[int] = []

    def redirect(self, target: int) -> int:
        """Redirects to where a descriptor goes. Returns what `restore` takes."""
        with self._lock:
            _flush()
            if self._screen is None:
                self._screen = os.dup(2)
            try:
                kept = os.dup(target)
            except OSError:
                self._close_unused_screen()
                raise
            self._targets.append(kept)
            os.dup2(kept, 2)
            return kept

    def restore(self, kept: int) -> None:
        """Ends one redirection; the others stay."""
        with self._lock:
            _flush()
            self._targets.remove(kept)
            assert self._screen is not None
            os.dup2(self._targets[-1] if self._targets else self._screen, 2)
            os.close(kept)
            self._close_unused_screen()

    def show(self, text: bytes) -> None:
        """Writes to the screen, whatever is redirected."""
        with self._lock:
            os.write(2 if self._screen is None else self._screen, text)

    def screen(self) -> int:
        """Returns a new descriptor of the screen."""
        with self._lock:
            return os.dup(2 if self._screen is None else self._screen)

    def _close_unused_screen(self) -> None:
        if self._screen is not None and not self._targets:
            os.close(self._screen)
            self._screen = None


_descriptor = _Descriptor()


@contextlib.contextmanager
def hide() -> Iterator[None]:
    """Hides what libraries write to standard error inside the context; shows it if that fails.

    It is kept in `hidden`. Nothing is hidden where TF_CPP_MIN_LOG_LEVEL asks for all messages.
    If several threads hide output at once, one of these threads keeps all output.
    """
    if shows_everything():
        yield
        return
    with tempfile.TemporaryFile() as messages:
        kept = _descriptor.redirect(messages.fileno())
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            _descriptor.restore(kept)
            messages.seek(0)
            text = messages.read()
            if has_failed:
                _descriptor.show(text)
            elif text.strip():
                hidden.append(text.decode(errors="replace").strip())


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
    screen = _descriptor.screen()
    with tempfile.NamedTemporaryFile() as file:
        try:
            # A new session keeps Ctrl-C from the copier, so that the copier outlives this process.
            copier = subprocess.Popen(
                ["sh", "-c", _COPY, "sh", file.name, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=screen,
                start_new_session=True,
            )
        finally:
            os.close(screen)
        assert copier.stdin is not None
        kept = _descriptor.redirect(copier.stdin.fileno())
        copier.stdin.close()
        try:
            yield result
        finally:
            _descriptor.restore(kept)
            # A process that was started inside the context may hold the pipe open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                copier.wait(_WAIT_SECONDS)
            result.text = file.read().decode(errors="replace")


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
