"""Part: one process's part of a snapshot, as the name of its file says it."""

from __future__ import annotations

import contextlib
import os
import pathlib

import msgspec

from lingvo_gshard.core import whole_number

# Environment variables: the folder for parts, and the parts to restore, separated by os.pathsep.
FOLDER, RESTORED = "GSHARD_SNAPSHOTS", "GSHARD_SNAPSHOT"

_SUFFIX = ".part"


class Part(msgspec.Struct, frozen=True, order=True):
    """The part of process `index` of `count` in a snapshot. Later snapshots are larger.

    `serial` numbers the snapshots within a `round` of the job.
    """

    round: int
    serial: int
    step: int
    count: int
    index: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.round}-{self.serial}-{self.step}-{self.count}-{self.index}{_SUFFIX}"

    def of(self, index: int) -> Part:
        """Returns the part of another process in the same snapshot."""
        return msgspec.structs.replace(self, index=index)

    @property
    def all(self) -> list[Part]:
        """The parts of all processes in the same snapshot."""
        return [self.of(index) for index in range(self.count)]

    @property
    def first(self) -> Part:
        """The first process's part, which stands for the snapshot."""
        return self.of(0)

    @classmethod
    def parse(cls, name: str) -> Part | None:
        """Returns the part that a file has; None if it is no complete part."""
        numbers = [whole_number(word) for word in name.removesuffix(_SUFFIX).split("-")]
        known = [number for number in numbers if number is not None]
        if not name.endswith(_SUFFIX) or (len(numbers), len(known)) != (5, 5):
            return None
        return cls(*known)

    @classmethod
    def within(cls, folder: pathlib.Path) -> list[Part]:
        """Returns the complete parts in a folder, in order."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(filter(None, map(cls.parse, os.listdir(folder))))
        return []
