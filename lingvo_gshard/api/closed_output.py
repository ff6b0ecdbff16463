"""GuardedStream: output whose reader may go away, such as a closed terminal or `| head -1`."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from typing import IO, Any

# Nobody reads any more. Other errors, such as a full disk under a log file, may pass.
CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF)


class GuardedStream:
    """Writes to another stream and never raises an OSError.

    Once the reader has gone, output is discarded and `on_closed` is called.
    """

    def __init__(self, stream: IO[str], on_closed: Callable[[], None]):
        """Makes the stream.

        Args:
          on_closed: called once, in the thread that writes. It may raise.
        """
        self._stream = stream
        self._on_closed = on_closed
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text; returns its length."""
        self._call(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is in memory."""
        self._call(self._stream.flush)

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            function()
            return
        except OSError as error:
            if error.errno not in CLOSED or self._is_closed:
                return
        self._is_closed = True
        discard(self._stream)
        self._on_closed()


def discard(stream: IO[str]) -> None:
    """Sends later writes to a stream, and the text in its memory, to /dev/null."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
