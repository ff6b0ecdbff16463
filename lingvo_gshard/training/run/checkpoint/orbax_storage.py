"""Makes Orbax write checkpoints to buckets. A checkpoint with a commit marker is complete.

Orbax knows gs://, not s3:// (its issue 359), and neither with time limits. `teach_orbax` gives it
the stores of core/files. This is the only file that names Orbax's private modules.

On a disk, a checkpoint that is being written has a longer name and is renamed in the end. A bucket
cannot rename: there, a checkpoint is complete if it has a commit marker, which is written last.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.digits import whole_number
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.stores import PREFIXES, is_bucket, key_value_store
from lingvo_gshard.core.lazy import ocp
from lingvo_gshard.core.processes import SharedError

# Orbax's name of the commit marker: with this file, a checkpoint in a bucket is complete.
COMMIT_MARKER = "commit_success.txt"
_SPECS = "orbax.checkpoint._src.serialization.tensorstore_utils"
_ATOMICITY = "orbax.checkpoint._src.path.atomicity"


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, ascending.

    Raises:
      BucketError: the directory's bucket is in trouble.
    """
    found = map(whole_number, objects.names(directory))
    numbers = [number for number in found if number is not None]
    if is_bucket(directory):
        numbers = [one for one in numbers if objects.is_file(marker(directory, one))]
    return sorted(numbers)


def marker(directory: pathlib.Path, step: int) -> str:
    """Returns the path of the commit marker of a checkpoint in a bucket."""
    return f"{os.fspath(directory)}/{step}/{COMMIT_MARKER}"


@functools.cache
def teach_orbax() -> None:
    """Makes Orbax open TensorStore's stores of buckets as core/files does."""
    specs = _private(_SPECS, "_use_gcs_driver", "_normalize_path", "gcs_utils")

    def normalized(path: str) -> str:
        if path.startswith(PREFIXES):
            scheme, _, rest = path.partition("://")
            return f"{scheme}://{os.path.normpath(rest)}"
        return os.path.normpath(path)

    replaced = types.SimpleNamespace(**vars(specs.gcs_utils))
    replaced.get_kvstore_for_gcs = key_value_store
    specs.__dict__.update(
        gcs_utils=replaced,
        _normalize_path=normalized,
        _use_gcs_driver=lambda directory: directory.startswith(PREFIXES),
    )


def temporary_path_class(
    directory: pathlib.Path,
    before_commit: Callable[[], None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
) -> type:
    """Returns the class that creates and completes checkpoints in a bucket for Orbax.

    Args:
      directory: the directory of the checkpoints.
      before_commit: called in a thread of Orbax before a checkpoint gets its commit marker. If the
        call fails, the checkpoint gets no marker.
      after_commit: called after the checkpoint has got its commit marker.
    """
    base = _private(_ATOMICITY, "CommitFileTemporaryPath").CommitFileTemporaryPath

    class InBucket(base):
        """A folder that is complete with its commit marker."""

        async def create(self) -> Any:
            """Creates nothing: files make the folder. Remains of earlier saves are gone by now."""
            return self.get()

        async def finalize(self) -> None:
            """Writes the commit marker."""
            is_checkpoint = os.fspath(self.get().parent) == os.fspath(directory)
            if is_checkpoint:
                await asyncio.to_thread(before_commit)
            await super().finalize()
            if is_checkpoint:
                await asyncio.to_thread(after_commit)

    return InBucket


def checkpointer(handler: ocp.CheckpointHandler, directory: pathlib.Path) -> ocp.Checkpointer:
    """Returns Orbax's writer of a single item of a checkpoint, on a disk or in a bucket."""
    if not is_bucket(directory):
        return ocp.Checkpointer(handler)
    teach_orbax()
    return ocp.Checkpointer(handler, temporary_path_class=temporary_path_class(directory))


def remove_unfinished(directory: pathlib.Path) -> None:
    """Deletes what saves that were cut short have left in a bucket."""
    complete = set(steps_in(directory))
    for name in objects.names(directory):
        if whole_number(name) not in complete:
            objects.remove_tree(directory / name)


def delete(directory: pathlib.Path, step: int) -> None:
    """Deletes a checkpoint of a bucket; it is incomplete from the first moment."""
    objects.remove(marker(directory, step))
    objects.remove_tree(directory / str(step))


def _private(module: str, *names: str) -> Any:
    """Returns a private module of Orbax that has these names."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    if found is None or not all(hasattr(found, name) for name in names):
        raise ImportError(
            f"Orbax {ocp.__version__} no longer has its private {module} with {', '.join(names)}, "
            "which checkpoints in buckets need; training/run/checkpoint/orbax_storage.py of "
            "lingvo_gshard is the one file that names it"
        )
    return found


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
