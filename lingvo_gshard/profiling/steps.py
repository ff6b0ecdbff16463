"""The steps to profile: `20:23` is steps 20, 21, 22 and 23."""

from __future__ import annotations

import re
from typing import NamedTuple

from lingvo_gshard.core.errors import UserError


class StepRange(NamedTuple):
    """The first and the last step of a profile, both included, numbered from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    @property
    def in_words(self) -> str:
        """The steps in words, such as "steps 20 to 23"."""
        if self.count == 1:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


def parse(text: str) -> StepRange:
    """Returns the steps of a text such as `20:23`, or `20` for one step.

    Raises:
      UserError: names --profile_steps if the text is something else.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not match:
        raise UserError(
            f"`profile_steps={text}`: expected the first and the last step to profile, such "
            "as 20:23"
        )
    steps = StepRange(int(match[1]), int(match[2] or match[1]))
    if not 1 <= steps.first <= steps.last:
        raise UserError(
            f"`profile_steps={text}`: steps are numbered from 1, and the first one comes first, "
            f"such as {max(1, min(steps))}:{max(1, *steps)}"
        )
    return steps


def check_within(steps: StepRange, total: int) -> None:
    """Raises ValueError if a run of `total` steps ends before the steps to profile do."""
    if steps.last > total:
        raise UserError(
            f"`profile_steps={steps}`: the run ends with step {total:,}. Profile earlier steps, or "
            "train longer with `steps`"
        )


def check_not_taken(steps: StepRange, next_step: int) -> None:
    """Raises ValueError if a resumed run has taken the steps to profile already."""
    if steps.first < next_step:
        example = StepRange(next_step + 1, next_step + steps.count)
        raise UserError(
            f"`profile_steps={steps}`: the run resumes with step {next_step:,}. Profile later "
            f"steps, such as {example}"
        )
