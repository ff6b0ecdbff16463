"""Errors of Orbax: told once and in a line, where it would tell them many times and at length."""

from __future__ import annotations

import functools
import logging
import pathlib
import sys

from lingvo_gshard.training.processes import SharedError


@functools.cache
def quiet_orbax() -> None:
    """Drops what follows a failure that the store reports in one line.

    Orbax logs a traceback from each of its threads, and TensorStore's other reads and writes end
    after the event loop that waited for them.
    """
    logging.getLogger("absl").addFilter(
        lambda record: "orbax" not in pathlib.PurePath(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )
    plain = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            plain(unraisable)

    sys.unraisablehook = hook


def reason_of(error: Exception) -> str:
    """Returns an error in a line: what the system says of it, else its type and first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "No space left on device" in str(error):
        return "no space left on device"
    if isinstance(error, SharedError):
        return str(error).splitlines()[0][:300]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
