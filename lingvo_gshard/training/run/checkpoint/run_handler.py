"""The `run` item of a checkpoint, as Orbax writes it.

Orbax's classes are the base classes here, so importing this file imports Orbax and jax.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from lingvo_gshard.core import processes
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
