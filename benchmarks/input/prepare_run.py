"""Prepares a file and prints the seconds of each stage as JSON: the process that is measured."""

from __future__ import annotations

import sys
import time

import msgspec

from lingvo_gshard.core import SilentProgress
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare


class _Times(SilentProgress):
    """Notes the time when each stage begins."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._stage, self._began = "Starting", time.monotonic()

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Ends a stage and begins the next one."""
        now = time.monotonic()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._began
        self._stage, self._began = stage, now


def main() -> None:
    """Prepares a file (argument 1) in a directory (2) with a number of workers (3)."""
    source, output, workers = sys.argv[1:]
    times = _Times()
    manifest = prepare(output, [source], PrepareOptions(workers=int(workers)), times)
    times.begin("")
    kept = sum(map(manifest.rows, manifest.splits))
    print(msgspec.json.encode({"kept": kept, "seconds": times.seconds}).decode())


if __name__ == "__main__":
    main()
