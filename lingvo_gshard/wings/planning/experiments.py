"""Plans the training step of an experiment."""

from __future__ import annotations

import dataclasses

import msgspec

from lingvo_gshard.core import SILENT, Params, Progress, option
from lingvo_gshard.runtime import CompileOptions, platform_of
from lingvo_gshard.sharding import DEFAULT_STRATEGY, Partitioning, PartitioningOptions
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.planning import calibration, planner
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.loads import rating
from lingvo_gshard.wings.planning.loads.layers import expert_layers
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.services.routers.counts import watched_layers


@dataclasses.dataclass(frozen=True)
class PlanOptions(CompileOptions, PartitioningOptions):
    """Options for planning an experiment's training step, and for loads besides even ones."""

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
    layers = []
    if loads:
        rating.check_model(loads, watched_layers(trainer.task), experiment.name)
        progress.begin("reading the loads")
        platform = platform_of(topology.compile_devices()[0])
        layers = expert_layers(trainer, batch, partitioning.on(platform))
        rating.check_replicas(options.loads.replicas, layers)
    plan = planner.plan_step(
        trainer,
        batch,
        partitioning,
        topology,
        experiment.name,
        experiments.requested_partitioner(experiment, options.partitioner),
        options.tokens,
        progress,
        measured,
        experiments.requested_compile_options(experiment, options.compile_options),
    )
    plan = msgspec.structs.replace(plan, params=planned_params(experiment, plan, options).to_text())
    if loads:
        rated = rating.rate(plan, layers, loads, options.loads.replicas)
        plan = msgspec.structs.replace(plan, loads=rated)
    return plan


def planned_params(experiment: Params, plan: Plan, options: PlanOptions) -> Params:
    """Returns an experiment's Params with mesh, strategy and compiler options of its plan."""
    changed = experiment.copy()
    changed.sharding.set(
        mesh=plan.mesh,
        strategy=options.strategy or experiment.sharding.strategy or DEFAULT_STRATEGY,
        device_order=options.device_order or experiment.sharding.device_order,
        partitioner=plan.partitioner,
        compile_options=experiments.requested_compile_options(experiment, options.compile_options),
    )
    return changed


def planned_partitioning(
    experiment: Params, topology: Topology, options: PlanOptions
) -> Partitioning:
    """Returns the mesh and strategy to plan with. Raises UserError if the mesh does not fit."""
    mesh = experiments.requested_mesh(experiment, options.mesh, options.device_order)
    mesh = mesh or experiments.one_axis(experiment, topology.devices, options.device_order)
    compilation.check_mesh(mesh, topology)
    return experiments.requested_partitioning(experiment, mesh, options.strategy)
