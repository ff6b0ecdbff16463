"""Progress reports of the planner: it names each stage as the stage begins."""

from __future__ import annotations

from collections.abc import Callable

# Called with a stage in words, such as "compiling for v3:16x16".
Progress = Callable[[str], None]


def ignore_progress(stage: str) -> None:
    """Ignores the stage. The default of all planning functions."""
    del stage
