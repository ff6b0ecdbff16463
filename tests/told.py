"""A Progress that notes what it is told."""

from __future__ import annotations

from lingvo_gshard.core.progress import SilentProgress


class Told(SilentProgress):
    """Notes what work tells about itself.

    Attributes:
      stages: the stages that began.
      totals: (unit, total) of each.
      done: the amounts done.
      shares: the shares done.
      said: the lines.
    """

    def __init__(self):
        self.stages: list[str] = []
        self.totals: list[tuple[str, int | None]] = []
        self.done: list[int] = []
        self.shares: list[float | None] = []
        self.said: list[str] = []

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        self.stages.append(stage)
        self.totals.append((unit, total))

    def update(self, done: int, share: float | None = None) -> None:
        self.done.append(done)
        self.shares.append(share)

    def say(self, text: str) -> None:
        self.said.append(text)
