"""Searches for the mesh, strategy and rematerialization policy of an experiment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.hlo.operations import Collective, Operation
from lingvo_gshard.planning import planner, roofline
from lingvo_gshard.planning.machines import efficiencies, interconnect
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.search.candidates import Candidate, policy_params
from lingvo_gshard.planning.search.costs import Rates
from lingvo_gshard.planning.search.search import (
    CompileCandidate,
    CompiledCost,
    RatedCandidate,
    SearchResult,
    search,
)
from lingvo_gshard.planning.search.tracing import trace
from lingvo_gshard.runtime.program.step_programs import BatchSpecs
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.experiments import (
    batch_specs,
    make_trainer,
    requested_compile_options,
    requested_partitioner,
)
from lingvo_gshard.training.step.trainer import Trainer

# Hyperparameter of tasks: the number of positions whose logits are computed at once.
_LOGITS = "logits_positions"
_ALL_POSITIONS = 2**31 - 1


def candidate_compiler(
    make_trainer: Callable[[str], Trainer],
    batch: BatchSpecs,
    topology: Topology,
    partitioner: str = "gspmd",
    plans: dict[Candidate, Plan] | None = None,
    progress: Progress = SILENT,
    compile_options: Sequence[str] = (),
) -> CompileCandidate:
    """Returns a function that compiles a candidate's training step for a topology.

    Args:
      make_trainer: makes the trainer with a rematerialization policy.
      batch: shape and dtype of each array of a batch.
      topology: the machine.
      partitioner: "gspmd" or "shardy".
      plans: collects the plan of each compiled candidate.
      progress: is told each stage as it begins.
      compile_options: changes to the compiler's options, as `plan_step` takes them.
    """

    def compile_candidate(candidate: Candidate) -> CompiledCost:
        overrides = dict(candidate.overrides)
        partitioning = Partitioning.make(candidate.mesh, candidate.strategy, overrides)
        trainer = make_trainer(candidate.rematerialize)
        plan = planner.plan_step(
            trainer,
            batch,
            partitioning,
            topology,
            "searched",
            partitioner,
            progress=progress,
            compile_options=compile_options,
        )
        if plans is not None:
            plans[candidate] = plan
        return CompiledCost(plan.fits, plan.bytes_per_device.peak, plan.seconds_per_step)

    return compile_candidate


_DTYPES = ("float32", "bfloat16", "float16")
# FLOPs of a matrix product that reaches the highest measured efficiency.
_LARGE = 1e13


def rates_of(topology: Topology) -> Rates:
    """Returns the estimated rates of one device of a topology."""
    chip = topology.chip
    share = efficiencies.matmul_efficiency(chip, _LARGE).value

    @functools.cache
    def collective_seconds(kind: str, bytes: int, axes: tuple[str, ...], mesh: Mesh) -> float:
        size = mesh.parts(axes)
        slices = interconnect.spanned_slices(axes, topology, mesh)
        call = Collective(kind, axes, size, "float32", bytes, slices=slices)
        operation = Operation("searched", kind, "", "other", collective=call)
        (timed,) = roofline.time_operations([operation], topology, mesh)
        return timed.seconds

    return Rates(
        flops_per_second={dtype: share * chip.peak(dtype) for dtype in _DTYPES},
        bytes_per_second=efficiencies.memory_efficiency(chip).value * chip.memory_bandwidth,
        capacity=chip.usable_bytes,
        collective_seconds=collective_seconds,
    )


@dataclasses.dataclass(frozen=True)
class ExperimentSearch:
    """The result of a search for an experiment.

    Attributes:
      experiment: the experiment, with the settings of its compiler and no choice of the search.
      topology: the machine.
      result: all candidates with their costs.
      plan: plan of the best candidate; None if none was compiled or none fits.
      policy_params: paths of the experiment's rematerialization policies.
    """

    experiment: Params
    topology: Topology
    result: SearchResult
    plan: Plan | None
    policy_params: tuple[str, ...]

    def settings(self, row: RatedCandidate) -> list[str]:
        """Returns the settings that select a candidate."""
        return row.candidate.settings(self.policy_params)

    def params(self, row: RatedCandidate) -> Params:
        """Returns the experiment's Params with all choices of a candidate."""
        return row.candidate.params(self.experiment, self.policy_params)


def search_experiment(
    experiment: Params,
    topology: Topology,
    compilations: int = 4,
    partitioner: str | None = None,
    progress: Progress = SILENT,
    compile_options: Sequence[str] = (),
) -> ExperimentSearch:
    """Returns the fastest way to partition and rematerialize an experiment's training step.

    Args:
      experiment: Params; their own mesh, strategy and rematerialization policies are ignored.
      topology: the machine.
      compilations: number of candidates to compile before deciding; 0 trusts the cost model.
      partitioner: "gspmd" or "shardy"; None: the experiment's.
      progress: is told each event of the search, and each stage of a compilation.
      compile_options: changes to the compiler's options, as `plan_step` takes them. None: the
        experiment's.
    """
    experiment = experiment.copy()
    sharding = experiment.sharding.set(
        # A named mesh may be in an order of its own. The search proposes meshes for this one.
        device_order="contiguous",
        partitioner=requested_partitioner(experiment, partitioner),
        compile_options=requested_compile_options(experiment, compile_options),
    )
    paths = tuple(policy_params(experiment.leaves()))
    batch = batch_specs(experiment)

    def trainer_of(policy: str, **values: Any) -> Trainer:
        changed = experiment.copy()
        for path in paths:
            changed.set_path(path, policy)
        changed.task.set(**values)
        return make_trainer(changed)

    progress.say("tracing the model")
    plans: dict[Candidate, Plan] = {}
    compile_candidate = None
    if compilations:
        compile_candidate = candidate_compiler(
            trainer_of,
            batch,
            topology,
            sharding.partitioner,
            plans,
            progress,
            sharding.compile_options,
        )
    # The cost model reads the letters of products. Chunks of logits lack the rows' letter.
    whole = {_LOGITS: _ALL_POSITIONS} if _LOGITS in experiment.task else {}
    result = search(
        trace(trainer_of(remat_policy.NONE, **whole), batch),
        topology.devices,
        rates_of(topology),
        compile_candidate,
        compile_best=compilations,
        policies=tuple(remat_policy.POLICIES) if paths else (remat_policy.NONE,),
        torus=_torus(topology),
        progress=progress,
    )
    found = ExperimentSearch(experiment, topology, result, None, paths)
    plan = plans.get(result.best.candidate) if result.best else None
    if result.best is None or plan is None:
        return found
    text = found.params(result.best).to_text()
    plan = msgspec.structs.replace(plan, name=experiment.name, params=text)
    return dataclasses.replace(found, plan=plan)


def _torus(topology: Topology) -> tuple[int, ...]:
    """Returns the interconnect's shape in devices.

    Slices are the major dimension of the shape, the devices of one chip the minor dimension.
    """
    if topology.kind != "tpu":
        return ()
    sizes = (topology.slices, *topology.shape, topology.chip.partitions)
    return sizes[topology.slices == 1 : None if topology.chip.partitions > 1 else -1]
