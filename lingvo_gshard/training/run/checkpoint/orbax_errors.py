"""Turns errors of Orbax, which it logs many times and at length, into one line."""

from __future__ import annotations

import functools
import logging
import pathlib
import sys

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.processes import SharedError


@functools.cache
def quiet_orbax() -> None:
    """Silences what Orbax and TensorStore log about a failure that the store reports itself.

    Orbax logs a traceback from each of its threads. TensorStore's remaining reads and writes
    complain that their event loop is closed.
    """
    logging.getLogger("absl").addFilter(
        lambda record: "orbax" not in pathlib.PurePath(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook


def reason_of(error: Exception) -> str:
    """Returns an error as one line: the system's message, else its type and first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "No space left on device" in str(error):
        return "no space left on device"
    if isinstance(error, SharedError):
        return str(error).splitlines()[0][:300]
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, UserError):
        return lines[0][:300]
    return f"{type(error).__name__}: {lines[0][:300]}"
