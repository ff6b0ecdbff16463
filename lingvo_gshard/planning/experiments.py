"""Plans the training step of an experiment from plain options."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.options import option
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.planning import calibration, planner
from lingvo_gshard.planning.compiling import compilation
from lingvo_gshard.planning.loads.given import GivenLoads, LoadsOptions
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PartitioningOptions
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import experiments


@dataclasses.dataclass(frozen=True)
class PlanOptions(PartitioningOptions):
    """Options for the partitioning and compilation of an experiment's training step.

    Attributes:
      loads: the loads of routers to plan with, besides even ones.
    """

    tokens: float | None = option(
        None,
        "Total number of tokens to train on; the plan then says what the training costs.",
        minimum=0,
    )
    calibration: str | None = option(
        None,
        "File with measured by predicted times, which corrects the estimates. gshard-train writes "
        "it from a profile of steps and their plan (docs/profiling.md).",
    )
    loads: LoadsOptions = LoadsOptions()


class PlanExperiment(Protocol):
    """The signature of `plan_experiment`."""

    def __call__(
        self, experiment: Params, topology: Topology, options: PlanOptions, progress: Progress
    ) -> Plan: ...


def plan_experiment(
    experiment: Params,
    topology: Topology,
    options: PlanOptions = PlanOptions(),
    progress: Progress = SILENT,
) -> Plan:
    """Returns the plan of an experiment's training step on a topology.

    Raises:
      UserError: if the mesh does not have as many devices as the topology, an override matches no
        layer, the calibration is for another chip, the loads are of another model, the compiler is
        missing, or the compiler rejects the program.
    """
    loads, measured = options.loads.read(), None
    if options.calibration is not None:
        measured = calibration.load(options.calibration)
        calibration.check_chip(measured, options.calibration, topology)
    partitioning = planned_partitioning(experiment, topology, options)
    trainer = experiments.make_trainer(experiment)
    experiments.check_overrides(partitioning, trainer)
    batch = experiments.batch_specs(experiment)
    given = None
    if loads:
        given = GivenLoads.of(
            loads,
            options.loads.replicas,
            trainer,
            batch,
            partitioning,
            experiment.name,
            progress,
        )
    plan = planner.plan_step(
        trainer,
        batch,
        partitioning,
        topology,
        experiment.name,
        options.partitioner,
        options.tokens,
        progress,
        measured,
    )
    return msgspec.structs.replace(plan, loads=given.rate(plan)) if given else plan


def planned_partitioning(
    experiment: Params, topology: Topology, options: PlanOptions
) -> Partitioning:
    """Returns the mesh and strategy that an experiment is planned with.

    Raises:
      UserError: if the mesh does not have as many devices as the topology.
    """
    mesh = experiments.requested_mesh(experiment, options.mesh, options.device_order)
    mesh = mesh or Mesh((("data", topology.devices),), options.device_order)
    compilation.check_mesh(mesh, topology)
    return experiments.requested_partitioning(experiment, mesh, options.strategy)
