"""Plans the training step of an experiment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec

from lingvo_gshard.core import SILENT, Params, Progress, option
from lingvo_gshard.runtime import CompileOptions, platform_of
from lingvo_gshard.sharding import DEFAULT_STRATEGY, Partitioning, PartitioningOptions
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import Trainer, experiments
from lingvo_gshard.wings.planning import calibration, planner
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.loads import rating
from lingvo_gshard.wings.planning.loads.layers import expert_layers
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.services.routers.counts import watched_layers

# Rows of a batch of a published model that is trained on few devices.
_LEAST_ROWS = 8


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
    plan = msgspec.structs.replace(
        plan,
        params=planned_params(experiment, plan, options).to_text(),
        notes=[*_notes_on_rows(trainer, batch, partitioning), *plan.notes],
    )
    if loads:
        rated = rating.rate(plan, layers, loads, options.loads.replicas)
        plan = msgspec.structs.replace(plan, loads=rated)
    return plan


def published_rows(
    experiment: Params, machines: Sequence[Topology], options: PlanOptions, is_search: bool = False
) -> int:
    """Returns the rows of a batch for a published model, whose config names none.

    There are at least eight, and as many as the mesh splits evenly. A search tries many meshes, so
    each device of its largest machine gets a row.
    """
    if is_search:
        parts = max(each.devices for each in machines)
    else:
        parts = _row_parts(planned_partitioning(experiment, machines[0], options))
    parts *= experiment.step.micro_batches
    return math.ceil(_LEAST_ROWS / parts) * parts


def _row_parts(partitioning: Partitioning) -> int:
    return partitioning.parts(partitioning.split("B")[0])


def _notes_on_rows(trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning) -> list[str]:
    """Returns a note if a step splits its rows unevenly."""
    parts, micro_batches = _row_parts(partitioning), trainer.p.micro_batches
    rows = next(iter(batch.values())).shape[0] // micro_batches
    if rows % parts == 0:
        return []
    padded = math.ceil(rows / parts) * parts
    return [
        f"the mesh splits the {rows:,} rows that a step computes at once into {parts:,} parts: "
        f"{padded - rows:,} of {padded:,} rows are padding, and XLA often exchanges whole "
        f"activations. Let input.batch_rows be a multiple of {parts * micro_batches:,}, or choose "
        "a mesh or strategy that splits rows into fewer parts"
    ]


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
