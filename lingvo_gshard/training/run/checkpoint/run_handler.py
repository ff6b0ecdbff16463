"""The `run` item of a checkpoint, as Orbax writes it.

Orbax's classes are the base classes here, so importing this file imports Orbax and jax.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future

from lingvo_gshard.core import processes
from lingvo_gshard.training.run.checkpoint import run_item
from lingvo_gshard.training.run.checkpoint.run_item import RunRecord, WriteExtras


class RunHandler(ocp.AsyncCheckpointHandler):
    """Writes the `run` item for Orbax, in a thread of the main process."""

    async def async_save(self, directory: Any, args: RunSave) -> list[Any] | None:
        """Begins to write run.json, params.txt and extras/."""
        if not processes.is_main():
            return None
        writing = asyncio.to_thread(args.write, directory)
        return [future.CommitFutureAwaitingContractedSignals(writing, name=run_item.ITEM)]

    def save(self, directory: Any, args: RunSave) -> None:
        """Not used: the checkpoints' manager saves in the background."""
        raise NotImplementedError("async_save writes this item")

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not used: `read_run` reads the item."""
        raise NotImplementedError("read_run reads this item")


@ocp.args.register_with_handler(RunHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RunSave(ocp.args.CheckpointArgs):
    """The content of a `run` item that is to be written."""

    record: RunRecord
    params_text: str
    write_extras: WriteExtras | None

    def write(self, directory: Any) -> None:
        """Writes the item into a local directory."""
        folder = pathlib.Path(directory)
        run_item.write_run(folder, self.record, self.params_text, self.write_extras)
