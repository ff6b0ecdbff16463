"""The `run` item of a checkpoint, as Orbax writes it.

Orbax's classes are the base classes here, so importing this file imports Orbax and jax.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from lingvo_gshard.core import processes
from lingvo_gshard.core.files import local_copies
from lingvo_gshard.training.run.checkpoint import run_item
from lingvo_gshard.training.run.checkpoint.run_item import RunRecord, WriteExtras


class RunHandler(ocp.CheckpointHandler):
    """Writes the `run` item for Orbax to a disk, in the main process."""

    def save(self, directory: Any, args: RunSave) -> None:
        """Writes run.json, params.txt and extras/."""
        if processes.is_main():
            args.write(pathlib.Path(directory))

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not used: `read_run` reads the item."""
        raise NotImplementedError("read_run reads this item")


class RunInBucketHandler(ocp.AsyncCheckpointHandler):
    """Writes the `run` item for Orbax to a bucket, in a thread of the main process."""

    async def async_save(self, directory: Any, args: RunSave) -> list[Any] | None:
        """Writes run.json, params.txt and extras/ to a local disk, and begins to copy them."""
        if not processes.is_main():
            return None
        local = local_copies.new_folder("run-item")
        args.write(local)
        pool = concurrent.futures.ThreadPoolExecutor(1)
        try:
            return [pool.submit(local_copies.upload_folder, local, directory)]
        finally:
            pool.shutdown(wait=False)

    def save(self, directory: Any, args: RunSave) -> None:
        """Not used: the checkpoints' manager saves in the background."""
        raise NotImplementedError("async_save writes this item")

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not used: `read_run` reads the item."""
        raise NotImplementedError("read_run reads this item")


@ocp.args.register_with_handler(RunHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RunSave(ocp.args.CheckpointArgs):
    """The content of a `run` item that is to be written.

    Attributes:
      record: the content of run.json.
      params_text: the content of params.txt.
      write_extras: writes files into the directory extras/; None leaves it empty.
    """

    record: RunRecord
    params_text: str
    write_extras: WriteExtras | None

    def write(self, directory: pathlib.Path) -> None:
        """Writes the item into a local directory."""
        run_item.write_run(directory, self.record, self.params_text, self.write_extras)


@ocp.args.register_with_handler(RunInBucketHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RunInBucketSave(RunSave):
    """The content of a `run` item that is to be written to a bucket."""
