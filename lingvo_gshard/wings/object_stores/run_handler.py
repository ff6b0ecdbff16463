"""The `run` item of a checkpoint in a bucket, as Orbax writes it.

Orbax's classes are the base classes here, so importing this file imports Orbax and jax.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp

from lingvo_gshard.training import RunHandler, RunSave
from lingvo_gshard.wings.object_stores import buckets, scratch


class RunInBucketHandler(RunHandler):
    """Writes the `run` item for Orbax to a bucket, in a thread of the main process."""


@ocp.args.register_with_handler(RunInBucketHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RunInBucketSave(RunSave):
    """The content of a `run` item that is to be written to a bucket."""

    def write(self, directory: Any) -> None:
        """Writes the item to a local disk, and copies it to a folder of the bucket."""
        local = scratch.new_folder("run-item")
        super().write(local)
        buckets.upload_folder(local, directory)
