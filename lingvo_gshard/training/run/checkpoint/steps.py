"""Finds the complete checkpoints of a directory.

On a disk, a checkpoint that is being written has a longer name and is renamed in the end. A bucket
cannot rename: there, a checkpoint is complete if it has a commit marker, which is written last.
"""

from __future__ import annotations

import os
import pathlib

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.paths import is_bucket

# The file in a checkpoint in a bucket that says that it is complete, as Orbax names it.
COMMIT_MARKER = "commit_success.txt"


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, ascending.

    Raises:
      BucketError: the directory's bucket is in trouble.
    """
    numbers = [int(name) for name in objects.names(directory) if name.isdigit()]
    if is_bucket(directory):
        numbers = [one for one in numbers if objects.is_file(marker(directory, one))]
    return sorted(numbers)


def marker(directory: pathlib.Path, step: int) -> str:
    """Returns the path of the commit marker of a checkpoint in a bucket."""
    return f"{os.fspath(directory)}/{step}/{COMMIT_MARKER}"
