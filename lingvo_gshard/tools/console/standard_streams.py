"""Opens standard streams that are closed, and gives standard error a descriptor of our own."""

from __future__ import annotations

import os
import sys
from typing import IO, TextIO, cast

from lingvo_gshard.training.run.monitoring.closed_output import GuardedStream


def open_closed_streams() -> None:
    """Opens the null device for standard streams that are closed.

    Otherwise the next file that is opened takes their place, and receives what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest descriptor that is free is this one.
            os.open(os.devnull, os.O_RDWR)
    if not isinstance(sys.stderr, GuardedStream):
        # A message that nobody reads any more is no reason to fail.
        sys.stderr = cast(TextIO, GuardedStream(_own_standard_error(), lambda: None))


def _own_standard_error() -> IO[str]:
    """Returns a stream on a copy of descriptor 2, so that redirecting libraries spares our lines.

    A stream that something else has put in the place of standard error stays.
    """
    if sys.stderr is not None:
        try:
            if sys.stderr.fileno() != 2:
                return sys.stderr
        except (OSError, ValueError):
            return sys.stderr
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    return os.fdopen(os.dup(2), "w", encoding=encoding, errors="backslashreplace", buffering=1)
