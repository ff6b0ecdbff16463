"""LargestBatch: the result of the search for the largest batch, as data for every report."""

from __future__ import annotations

from lingvo_gshard.planning.plan.generation_plan import GenerationPlan
from lingvo_gshard.planning.plan.plan import Record


class BatchTrial(Record, frozen=True, kw_only=True):
    """A batch whose programs were compiled.

    Attributes:
      batch: texts that are decoded together.
      fits: whether all programs fit in the memory of each device.
      peak: bytes of one device, of the program that needs most.
      capacity: bytes that a program may use.
      tokens_per_second: estimate, of all texts together.
    """

    batch: int
    fits: bool
    peak: int
    capacity: int
    tokens_per_second: float


class LargestBatch(Record, frozen=True, kw_only=True):
    """The largest batch that fits.

    Attributes:
      batch: texts that are decoded together; 0 if no batch fits.
      granule: batches are multiples of this number, or 1: the batches that a mesh decodes at once.
      next_batch: the next larger batch, which was compiled and does not fit; None if the search
        ended at the largest batch that it tries.
      trials: all batches that were compiled, in order.
      plan: the plan of generating with `batch`, or with the smallest batch if none fits.
    """

    batch: int
    granule: int
    next_batch: int | None
    trials: list[BatchTrial]
    plan: GenerationPlan
