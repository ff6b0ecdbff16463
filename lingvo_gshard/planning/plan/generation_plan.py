"""GenerationPlan: the memory, time and cost of generating text, as data for every report."""

from __future__ import annotations

from lingvo_gshard.planning.plan.plan import Plan, Record
from lingvo_gshard.planning.roofline import Budget

# The limits of a program, by the field of a layer's row that has the seconds.
_BOUNDS = {
    "memory_seconds": "memory bandwidth",
    "compute_seconds": "arithmetic",
    "communication_seconds": "communication",
}


class GenerationPlan(Record, frozen=True, kw_only=True):
    """The plan of generation on a machine: memory, time and cost.

    Attributes:
      batch: texts that are decoded together.
      length: positions that each text's keys and values are kept for.
      prompt: positions of the prompt of a text that enters.
      steps: tokens that one call of the decoding program adds to each text.
      fits: whether all planned programs fit in the memory of each device.
      cache_bytes: keys and values on one device.
      cache_bytes_per_text: keys and values of one text, on all devices together.
      step: a call of the decoding program, for texts that fill their `length` positions.
      bounded_by: what decoding spends most of its time on.
      prefill: the pass over the prompts of the texts that enter together; None if not planned.
      generated: cost of a million generated tokens, prompts left out.
      prompted: cost of a million tokens of prompts; None if not planned.
    """

    batch: int
    length: int
    prompt: int
    steps: int
    fits: bool
    cache_bytes: int
    cache_bytes_per_text: int
    step: Plan
    bounded_by: str
    prefill: Plan | None
    generated: Budget
    prompted: Budget | None

    @property
    def seconds_per_token(self) -> float:
        """Seconds between two tokens of a text."""
        return self.step.seconds_per_step / self.steps


def bounded_by(plan: Plan) -> str:
    """Returns what a program spends most of its time on, by the lower bounds of its operations."""
    seconds = {name: sum(getattr(row, name) for row in plan.layers) for name in _BOUNDS}
    return _BOUNDS[max(seconds, key=lambda name: seconds[name])]
