"""Compiles candidates with the planner."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.planning import planner
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.progress import Progress, ignore_progress
from lingvo_gshard.planning.search.candidates import Candidate
from lingvo_gshard.planning.search.result import CompileCandidate, CompiledCost
from lingvo_gshard.runtime.program.step_programs import BatchSpecs
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.trainer import Trainer


def candidate_compiler(
    make_trainer: Callable[[str], Trainer],
    batch: BatchSpecs,
    topology: Topology,
    partitioner: str = "gspmd",
    plans: dict[Candidate, Plan] | None = None,
    progress: Progress = ignore_progress,
) -> CompileCandidate:
    """Returns a function that compiles a candidate's training step for a topology.

    Args:
      make_trainer: makes the trainer with a rematerialization policy.
      batch: shape and dtype of each array of a batch.
      topology: the machine.
      partitioner: "gspmd" or "shardy".
      plans: collects the plan of each compiled candidate.
      progress: called with each stage of a compilation.
    """

    def compile_candidate(candidate: Candidate) -> CompiledCost:
        overrides = dict(candidate.overrides)
        partitioning = Partitioning.make(candidate.mesh, candidate.strategy, overrides)
        trainer = make_trainer(candidate.rematerialize)
        plan = planner.plan_step(
            trainer, batch, partitioning, topology, "searched", partitioner, progress=progress
        )
        if plans is not None:
            plans[candidate] = plan
        return CompiledCost(plan.fits, plan.bytes_per_device.peak, plan.seconds_per_step)

    return compile_candidate
