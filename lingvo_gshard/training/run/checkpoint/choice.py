"""The choice of the checkpoint to read: the best, the newest, or the one of a step."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from lingvo_gshard.core import UserError, whole_number
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in
from lingvo_gshard.training.run.checkpoint.run_item import Best, read_run

BEST, NEWEST = "best", "newest"


def check_choice(choice: str | int) -> None:
    """Raises ValueError if a choice is neither BEST nor NEWEST nor a step."""
    if choice not in (BEST, NEWEST) and whole_number(str(choice)) is None:
        raise UserError(
            f"`checkpoint={choice}`: expected {BEST}, {NEWEST} or the step of a checkpoint"
        )


def best_of(directory: pathlib.Path, steps: Sequence[int]) -> Best | None:
    """Returns the best evaluation by the newest readable checkpoint; None if it records none."""
    for step in reversed(steps):
        try:
            return read_run(directory / str(step)).record.best
        except Exception:  # Restoring it reports the damage.
            continue
    return None


def preferred(directory: pathlib.Path, choice: str | int) -> list[int]:
    """Returns the steps of a directory's checkpoints to try, as `in_order` has them."""
    return in_order(directory, steps_in(directory), choice)


def in_order(directory: pathlib.Path, steps: Sequence[int], choice: str | int) -> list[int]:
    """Returns the steps of the checkpoints to try, in this order.

    The best, if the run keeps it, comes before the newest, and each before older ones.

    Args:
      steps: their steps, ascending.
      choice: BEST, NEWEST, or a step, whose checkpoint is then the only one.

    Raises:
      UserError: there is no checkpoint of the step.
    """
    check_choice(choice)
    newest_first = [*reversed(steps)]
    if choice == NEWEST:
        return newest_first
    if choice == BEST:
        best = best_of(directory, steps)
        return sorted(newest_first, key=lambda step: not best or step != best.step)
    if int(choice) not in steps:
        there = ", ".join(str(step) for step in steps) or "none"
        raise UserError(f"`checkpoint={choice}`: {directory} has the checkpoints {there}")
    return [int(choice)]
