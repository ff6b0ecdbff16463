"""Complete checkpoints of a directory, and failures of Orbax in words.

On a disk, a checkpoint that is being written has a longer name and is renamed in the end. A store
such as a bucket cannot rename: there, a checkpoint is complete if it has a commit marker, which is
written last.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable

import absl.logging

from lingvo_gshard.core import Seam, UserError, is_bucket, objects, whole_number
from lingvo_gshard.core.files.stores import scheme_of
from lingvo_gshard.core.processes import SharedError

# Orbax's name of the commit marker: with this file, a checkpoint in a store is complete.
COMMIT_MARKER = "commit_success.txt"

# Scheme of a store -> makes Orbax able to read and write arrays there.
ORBAX_STORES: Seam[Callable[[], None]] = Seam("orbax_stores")


def prepare_orbax(directory: pathlib.Path) -> None:
    """Makes Orbax able to read and write arrays in a directory, on a disk or in a store."""
    if is_bucket(directory):
        ORBAX_STORES[scheme_of(directory)]()


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, ascending.

    Raises:
      BucketError: the directory's store is in trouble.
    """
    found = map(whole_number, objects.names(directory))
    numbers = [number for number in found if number is not None]
    if is_bucket(directory):
        numbers = [one for one in numbers if objects.is_file(marker(directory, one))]
    return sorted(numbers)


def marker(directory: pathlib.Path, step: int) -> str:
    """Returns the path of the commit marker of a checkpoint in a store."""
    return f"{os.fspath(directory)}/{step}/{COMMIT_MARKER}"


# The system's message in an error of TensorStore, which names files at length.
_REASON = re.compile(r"No space left on device|(?<=: )[^:]+(?= \[os_error_code)")
_OF_A_CLOSED_LOOP = "exception was never retrieved", "Task was destroyed but it is pending"


@functools.cache
def quiet_orbax() -> None:
    """Silences what Orbax and TensorStore log about a failure that the store reports itself.

    Orbax logs a traceback from each of its threads. TensorStore's remaining reads and writes
    complain that their event loop is closed.
    """
    absl.logging.get_absl_logger().addFilter(
        lambda record: "orbax" not in pathlib.PurePath(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: not any(words in record.getMessage() for words in _OF_A_CLOSED_LOOP)
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
    who = f"{str(error).partition(': ')[0]}: " if isinstance(error, SharedError) else ""
    if found := _REASON.search(str(error)):
        return f"{who}{found.group().lower()}"
    first = (str(error).strip().splitlines() or [""])[0][:300]
    is_plain = isinstance(error, UserError | SharedError)
    return first if is_plain else f"{type(error).__name__}: {first}"
