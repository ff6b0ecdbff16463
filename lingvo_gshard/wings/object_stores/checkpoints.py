"""Makes Orbax write checkpoints to buckets. A checkpoint with a commit marker is complete.

Orbax knows gs://, not s3:// (its issue 359), and neither with time limits. `teach_orbax` gives it
the stores of this package. This is the only file that names Orbax's private modules.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib
import os
import pathlib
import types
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core import BucketError, is_bucket, objects, whole_number
from lingvo_gshard.core.lazy import ocp
from lingvo_gshard.training import (
    CHECKPOINT_STORAGES,
    ORBAX_STORES,
    DiskStorage,
    NewestAndBest,
    RunRecord,
    WriteExtras,
    marker,
    steps_in,
    unused_name,
)
from lingvo_gshard.wings.object_stores import buckets
from lingvo_gshard.wings.object_stores.connections import SCHEMES, key_value_store
from lingvo_gshard.wings.object_stores.problems import problem_of

_SPECS = "orbax.checkpoint._src.serialization.tensorstore_utils"
_ATOMICITY = "orbax.checkpoint._src.path.atomicity"


@functools.cache
def teach_orbax() -> None:
    """Makes Orbax open TensorStore's stores of buckets as this package does."""
    specs = _private(_SPECS, "_use_gcs_driver", "_normalize_path", "gcs_utils")

    def normalized(path: str) -> str:
        if is_bucket(path):
            scheme, _, rest = path.partition("://")
            return f"{scheme}://{os.path.normpath(rest)}"
        return os.path.normpath(path)

    replaced = types.SimpleNamespace(**vars(specs.gcs_utils))
    replaced.get_kvstore_for_gcs = key_value_store
    specs.__dict__.update(gcs_utils=replaced, _normalize_path=normalized, _use_gcs_driver=is_bucket)


def temporary_path_class(
    directory: pathlib.Path,
    before_commit: Callable[[], None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
) -> type:
    """Returns the class that creates and completes checkpoints in a bucket for Orbax.

    Args:
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


class BucketStorage(DiskStorage):
    """A directory in a bucket, where a marker says that a checkpoint is complete."""

    advice = "Check the bucket, the credentials and the network"

    def __init__(self, directory: pathlib.Path, before_commit: Callable[[], None]):
        super().__init__(directory)
        self._before_commit = before_commit

    def prepare(self) -> None:
        """Deletes what saves that were cut short have left."""
        complete = set(steps_in(self._directory))
        for name in objects.names(self._directory):
            if whole_number(name) not in complete:
                objects.remove_tree(self._directory / name)

    def options(self, policy: NewestAndBest) -> dict[str, Any]:
        teach_orbax()

        def delete_old() -> None:
            steps = steps_in(self._directory)
            for step in set(steps).difference(policy.kept(steps)):
                self.delete(step)

        return {
            # Orbax deletes nothing: it would ask further services how. `delete` does.
            "preservation_policy": ocp.checkpoint_managers.LatestN(None),
            "temporary_path_class": temporary_path_class(
                self._directory, self._before_commit, delete_old
            ),
        }

    def run_save(
        self, record: RunRecord, params_text: str, write_extras: WriteExtras | None
    ) -> Any:
        # Imports Orbax, which a start from the cache does not need.
        from lingvo_gshard.wings.object_stores.run_handler import RunInBucketSave

        return RunInBucketSave(record, params_text, write_extras)

    def check_writable(self, needed: int) -> None:
        """Does nothing: a bucket is never full, and answers each request in time."""

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; it is incomplete from the first moment."""
        objects.remove(marker(self._directory, step))
        objects.remove_tree(self._directory / str(step))

    def set_aside(self, step: int) -> pathlib.Path:
        target = unused_name(self._directory.parent, step)
        buckets.copy_tree(self._directory / str(step), target)
        self.delete(step)
        return target

    def reason_of(self, error: Exception) -> str:
        found = problem_of(error, os.fspath(self._directory), writes=True)
        if isinstance(found, BucketError) and found.errno != errno.EIO:
            return str(found.strerror)
        return super().reason_of(error)


def _private(module: str, *names: str) -> Any:
    """Returns a private module of Orbax that has these names."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    if found is None or not all(hasattr(found, name) for name in names):
        raise ImportError(
            f"Orbax {ocp.__version__} no longer has its private {module} with {', '.join(names)}, "
            "which checkpoints in buckets need; wings/object_stores/checkpoints.py of "
            "lingvo_gshard is the one file that names it"
        )
    return found


for _scheme in SCHEMES:
    ORBAX_STORES.register(_scheme)(teach_orbax)
    CHECKPOINT_STORAGES.register(_scheme)(BucketStorage)
