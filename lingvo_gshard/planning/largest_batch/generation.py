"""Searches the largest batch with which a language model generates on a topology."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.inference.programs.layout import row_parts
from lingvo_gshard.planning.experiments import PlanOptions, planned_partitioning
from lingvo_gshard.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.planning.largest_batch import search
from lingvo_gshard.planning.largest_batch.record import LargestBatch
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.generation_plan import GenerationPlan
from lingvo_gshard.planning.progress import Progress, ignore_progress


def plan_largest_batch(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    generation: GenerationOptions,
    progress: Progress = ignore_progress,
) -> LargestBatch:
    """Returns the largest batch whose programs fit, with its plan.

    Args:
      experiment: as for `plan_generation`.
      topology: the machine.
      options: how the programs are split and compiled.
      generation: what is generated; its batch does not count.
      progress: called with each stage as it begins.

    Raises:
      UserError: as `plan_generation` does.
    """

    def plan_of(batch: int) -> GenerationPlan:
        progress(f"batch {batch:,}")
        asked = dataclasses.replace(generation, batch=batch)
        return plan_generation(experiment, topology, options, asked, progress)

    parts = row_parts(planned_partitioning(experiment, topology, options))
    return search.find(plan_of, parts)
