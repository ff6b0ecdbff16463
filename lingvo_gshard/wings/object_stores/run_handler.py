"""The `run` item of a checkpoint in a bucket, as Orbax writes it.

Orbax's classes are the base classes here, so importing this file imports Orbax and jax.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import orbax.checkpoint as ocp

from lingvo_gshard.core import processes
from lingvo_gshard.training import RunSave
from lingvo_gshard.wings.object_stores import buckets, scratch


class RunInBucketHandler(ocp.AsyncCheckpointHandler):
    """Writes the `run` item for Orbax to a bucket, in a thread of the main process."""

    async def async_save(self, directory: Any, args: RunSave) -> list[Any] | None:
        """Writes run.json, params.txt and extras/ to a local disk, and begins to copy them."""
        if not processes.is_main():
            return None
        local = scratch.new_folder("run-item")
        args.write(local)
        pool = concurrent.futures.ThreadPoolExecutor(1)
        try:
            return [pool.submit(buckets.upload_folder, local, directory)]
        finally:
            pool.shutdown(wait=False)

    def save(self, directory: Any, args: RunSave) -> None:
        """Not used: the checkpoints' manager saves in the background."""
        raise NotImplementedError("async_save writes this item")

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not used: `read_run` reads the item."""
        raise NotImplementedError("read_run reads this item")


@ocp.args.register_with_handler(RunInBucketHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RunInBucketSave(RunSave):
    """The content of a `run` item that is to be written to a bucket."""
