"""Directories of checkpoints on disks and in stores, and which checkpoints are kept in them."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import Seam, is_bucket, objects, processes
from lingvo_gshard.core.files.stores import scheme_of
from lingvo_gshard.training.run.checkpoint.orbax_storage import reason_of
from lingvo_gshard.training.run.checkpoint.run_item import RunRecord, WriteExtras


class NewestAndBest:
    """Keeps the newest checkpoints, and the best one. A preservation policy of Orbax.

    Attributes:
      best_step: the step of the best checkpoint; None if there is none.
    """

    def __init__(self, number: int):
        """Makes the policy."""
        self._number = number
        self.best_step: int | None = None

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Returns the steps, of ascending ones, whose checkpoints are kept."""
        newest = set(steps[-self._number :])
        return [step for step in steps if step in newest or step == self.best_step]

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        """Returns whether each checkpoint, by its `step`, is kept. Orbax asks before it deletes."""
        kept = set(self.kept([each.step for each in checkpoints]))
        return [each.step in kept for each in checkpoints]


# Ends the name of a checkpoint that is being deleted.
_DELETED = ".deleted"
# More than a file system keeps without a block of the disk.
_TRIAL_BYTES = 4096
# More files and folders than a checkpoint has: a dozen for each part of the state.
_MOST_FILES = 100


class DiskStorage:
    """A directory of checkpoints on a disk, where renaming is atomic.

    Attributes:
      advice: tells the user what to do if a checkpoint could not be saved there.
    """

    advice = "Free some disk space"

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._is_prepared = False

    def prepare(self) -> None:
        """Creates the directory, and deletes what was left by processes that were killed."""
        # If the run's directory is moved away later, no second one takes its place.
        self._directory.mkdir(parents=not self._is_prepared, exist_ok=True)
        self._is_prepared = True
        for doomed in self._directory.glob(f"*{_DELETED}"):
            shutil.rmtree(doomed)

    def options(self, policy: NewestAndBest) -> dict[str, Any]:
        """Returns arguments of CheckpointManagerOptions."""
        return {"preservation_policy": policy, "cleanup_tmp_directories": True}

    def run_save(
        self, record: RunRecord, params_text: str, write_extras: WriteExtras | None
    ) -> Any:
        """Returns Orbax's arguments to save a `run` item; see `run_handler.RunSave`."""
        # Imports Orbax, which a start from the cache does not need.
        from lingvo_gshard.training.run.checkpoint.run_handler import RunSave

        return RunSave(record, params_text, write_extras)

    def check_writable(self, needed: int) -> None:
        """Raises OSError if a checkpoint of `needed` bytes cannot be written.

        Each process creates a folder and writes a file on trial. If Orbax found out while several
        processes save, the others would wait for the one that fails until a time limit.
        """
        processes.together(lambda: self._try(needed))

    def _try(self, needed: int) -> None:
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"no space left: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free",
            )
        found = os.statvfs(self._directory)
        # File systems that create inodes on demand state 0 of them.
        if found.f_files and found.f_favail < _MOST_FILES:
            raise OSError(
                errno.ENOSPC,
                f"no inodes left: a checkpoint may need {_MOST_FILES}, {found.f_favail} are free",
            )
        trial = self._directory / f"trial-{processes.index()}{_DELETED}"
        trial.mkdir(exist_ok=True)
        try:
            (trial / "file").write_bytes(bytes(_TRIAL_BYTES))
        finally:
            shutil.rmtree(trial)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint. A process that is killed meanwhile leaves none with holes."""
        doomed = self._directory / f"{step}{_DELETED}"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def set_aside(self, step: int) -> pathlib.Path:
        """Moves a damaged checkpoint out of the directory. Returns where it is then."""
        target = unused_name(self._directory.parent, step)
        (self._directory / str(step)).rename(target)
        return target

    def reason_of(self, error: Exception) -> str:
        """Returns why a save failed, as one line."""
        return reason_of(error)


# Makes the barrier of processes that save together: `barrier_sync_fn` of Orbax's AsyncOptions.
SAVE_BARRIERS: Seam[Callable[[], Callable[..., None]]] = Seam("save_barriers")
# Scheme of a store -> makes the storage of a directory there, with arguments as of `storage_of`.
CHECKPOINT_STORAGES: Seam[Callable[[pathlib.Path, Callable[[], None]], DiskStorage]] = Seam(
    "checkpoint_storages"
)


def storage_of(
    directory: pathlib.Path, before_commit: Callable[[], None] = lambda: None
) -> DiskStorage:
    """Returns the storage of a directory of checkpoints.

    Args:
      before_commit: called before a checkpoint in a store becomes complete.
    """
    if is_bucket(directory):
        return CHECKPOINT_STORAGES[scheme_of(directory)](directory, before_commit)
    return DiskStorage(directory)


def unused_name(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Returns a name for a damaged checkpoint that is not there yet."""
    number, target = 0, directory / f"damaged-{step}"
    while objects.exists(target):
        number += 1
        target = directory / f"damaged-{step}-{number}"
    return target
