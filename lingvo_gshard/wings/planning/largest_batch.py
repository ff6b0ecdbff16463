"""Searches the largest batch that a language model can generate on a topology.

A program's peak memory is nearly affine in the batch size: weights and code do not depend on the
batch size; keys, values and activations grow with it. Guesses therefore come from a line. The first
line goes through one compiled batch, with the bytes of its keys and values as the slope; later
lines go through two compiled batches. The result does not depend on the guesses: compiled programs
show that the batch fits and that the next larger batch does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from lingvo_gshard.core import SILENT, Params, Progress
from lingvo_gshard.wings.inference.programs.maker import row_parts
from lingvo_gshard.wings.planning.experiments import PlanOptions, planned_partitioning
from lingvo_gshard.wings.planning.generation import (
    GenerationOptions,
    GenerationPlan,
    plan_generation,
)
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Record


class BatchTrial(Record, frozen=True, kw_only=True):
    """A batch whose compiled programs need at most `peak` bytes per device. Rates are estimates."""

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


# No larger batch is tried.
MOST_TEXTS = 2**20
# After this many compilations, the bracket is doubled or halved: a peak that is far from affine
# could otherwise take as many compilations as there are batches.
_GUESSES = 4


def find(plan_of: Callable[[int], GenerationPlan], granule: int) -> LargestBatch:
    """Returns the largest batch, 1 or a multiple of `granule`, whose plan by `plan_of` fits."""
    search = _Search(plan_of, granule)
    if not search.fits(1):
        return search.result_of_the_smallest()
    while search.end - search.lower > 1:
        search.fits(search.guess())
    return search.result(search.lower * granule)


class _Search:
    """A bracket of batches, in granules: `lower` fits, `upper` does not. `most` is the limit."""

    def __init__(self, plan_of: Callable[[int], GenerationPlan], granule: int):
        self.lower, self.upper = 0, None
        self.most = max(MOST_TEXTS // granule, 1)
        self._plan_of, self._granule = plan_of, granule
        # The newest plans last.
        self._plans: dict[int, GenerationPlan] = {}

    @property
    def end(self) -> int:
        """The smallest number of granules that does not fit, or is not tried."""
        return self.upper or self.most + 1

    def fits(self, granules: int) -> bool:
        """Compiles a batch and narrows the bracket. Returns whether the batch fits."""
        plan = self._plan(granules * self._granule)
        if plan.fits:
            self.lower = max(self.lower, granules)
        else:
            self.upper = min(self.upper or granules, granules)
        return plan.fits

    def guess(self) -> int:
        """Returns the number of granules to compile next, inside the bracket."""
        found = self._by_line()
        if len(self._plans) > _GUESSES:
            found = 2 * self.lower if self.upper is None else (self.lower + self.end) // 2
        # If the batch at the line's end is known to fit, the next larger one is tried.
        return min(max(found, self.lower + 1), self.end - 1)

    def result(self, batch: int) -> LargestBatch:
        """Returns the result of a finished search."""
        return LargestBatch(
            batch=batch,
            granule=self._granule,
            next_batch=None if self.upper is None else self.upper * self._granule,
            trials=[
                BatchTrial(
                    batch=plan.batch,
                    fits=plan.fits,
                    peak=_peak(plan),
                    capacity=plan.step.bytes_per_device.capacity,
                    tokens_per_second=plan.step.tokens_per_second or 0.0,
                )
                for plan in self._plans.values()
            ],
            plan=self._plans[batch],
        )

    def result_of_the_smallest(self) -> LargestBatch:
        """Returns the result if one granule does not fit: one text, or none."""
        smallest = self._plan(1)
        found = self.result(1)
        if smallest.fits:
            return found
        return msgspec.structs.replace(found, batch=0, next_batch=1)

    def _plan(self, batch: int) -> GenerationPlan:
        if batch not in self._plans:
            self._plans[batch] = self._plan_of(batch)
        return self._plans[batch]

    def _by_line(self) -> int:
        """Returns a guess in granules: a line through the compiled peaks meets the capacity."""
        plans = list(self._plans.values())
        newest = plans[-1]
        peak, granules = _peak(newest), newest.batch / self._granule
        slope = newest.cache_bytes / granules
        if len(plans) > 1:
            before = plans[-2]
            slope = (peak - _peak(before)) / (granules - before.batch / self._granule)
        room = newest.step.bytes_per_device.capacity - peak
        # Memory that does not grow leaves the bracket's end as a guess.
        return int(granules + room / slope) if slope > 0 else self.most


def _peak(plan: GenerationPlan) -> int:
    """Returns the bytes of the program that needs most."""
    programs = [plan.step, *filter(None, [plan.prefill])]
    return max(program.bytes_per_device.peak for program in programs)


def plan_largest_batch(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    generation: GenerationOptions,
    progress: Progress = SILENT,
) -> LargestBatch:
    """Returns the largest batch whose programs fit, with its plan.

    Takes what `plan_generation` takes, and raises its errors. The batch of `generation` does not
    count.
    """

    def plan_of(batch: int) -> GenerationPlan:
        progress.begin(f"batch {batch:,}")
        asked = dataclasses.replace(generation, batch=batch)
        return plan_generation(experiment, topology, options, asked, progress)

    parts = row_parts(planned_partitioning(experiment, topology, options))
    return find(plan_of, parts)
