"""Plans the training step of an experiment, and suggests changes to a step that does not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

import msgspec

from lingvo_gshard.core import SILENT, Params, Progress, UserError, option
from lingvo_gshard.layers import MixtureOfExperts
from lingvo_gshard.runtime import CompileOptions, platform_of
from lingvo_gshard.sharding import Partitioning, PartitioningOptions
from lingvo_gshard.sharding.options import DEFAULT_STRATEGY
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.planning import calibration, planner
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.loads import rating
from lingvo_gshard.wings.planning.loads.layers import expert_layers
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan, Remedy
from lingvo_gshard.wings.services.routers.counts import watched_layers


@dataclasses.dataclass(frozen=True)
class PlanOptions(CompileOptions, PartitioningOptions):
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


_REMATERIALIZE = "full"
_SHARD_WEIGHTS = "fsdp"
_MIN_CAPACITY_FACTOR = 0.5


@dataclasses.dataclass(frozen=True)
class SuggestedSettings:
    """Settings that reduce the memory of a step.

    Attributes:
      params: new values of hyperparameters, by path.
      strategy: new sharding strategy; empty to keep the current one.
    """

    params: dict[str, object] = dataclasses.field(default_factory=dict)
    strategy: str = ""

    def __str__(self) -> str:
        """Returns the settings that make the change, each in backquotes."""
        strategy = [f"strategy={self.strategy}"] if self.strategy else []
        params = [f"{path} = {json.dumps(value)}" for path, value in self.params.items()]
        return " ".join(f"`{setting}`" for setting in (*strategy, *params))


def suggest(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    limit: int,
    progress: Progress = SILENT,
) -> list[Remedy]:
    """Returns the changes tried, in order, each with the result of its plan.

    Changes accumulate: each is planned together with all changes before it. The search ends at the
    first plan that fits.

    Args:
      experiment: Params of an experiment whose step does not fit; they are not modified.
      topology: the machine to plan for.
      options: the options of the plan that does not fit.
      limit: maximum number of changes to try. Each takes one compilation.
      progress: is told each change before it is tried, and each stage of a plan.
    """
    changed = experiment.copy()
    rows: list[Remedy] = []
    settings: list[str] = []
    for _, change in zip(range(limit), _changes(changed, options, topology), strict=False):
        settings.append(str(change))
        progress.say(f"it does not fit; trying {settings[-1]}")
        for path, value in change.params.items():
            changed.set_path(path, value)
        if change.strategy:
            options = dataclasses.replace(options, strategy=change.strategy)
        rows.append(_try(changed, topology, options, " ".join(settings), progress))
        if rows[-1].fits:
            break
    return rows


def _try(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    settings: str,
    progress: Progress,
) -> Remedy:
    try:
        planned = plan_experiment(experiment, topology, options, progress)
    except UserError as error:
        return Remedy(
            change=settings, fits=False, peak=None, seconds_per_step=None, reason=str(error)
        )
    return Remedy(
        change=settings,
        fits=planned.fits,
        peak=planned.bytes_per_device.peak,
        seconds_per_step=planned.seconds_per_step,
    )


def _changes(
    experiment: Params, options: PlanOptions, topology: Topology
) -> Iterator[SuggestedSettings]:
    """Yields possible changes, those that cost the least speed or quality first.

    The caller makes each change to `experiment` before it asks for the next one.
    """
    yield from _for_stacks(experiment, "execution.rematerialize", lambda stack: _REMATERIALIZE)
    strategy = options.strategy or experiment.sharding.strategy or DEFAULT_STRATEGY
    if "->" not in strategy and _SHARD_WEIGHTS not in strategy.split("_"):
        yield SuggestedSettings(strategy=f"{strategy}_{_SHARD_WEIGHTS}")
    if experiment.step.precision == "float32":
        yield SuggestedSettings({"step.precision": "bfloat16"})
    while experiment.input.batch_rows >= 2 * topology.devices:
        yield SuggestedSettings({"input.batch_rows": experiment.input.batch_rows // 2})
    yield from _for_stacks(experiment, "moe.router.capacity_factor", _smaller_capacity_factor)


def _for_stacks(
    experiment: Params, path: str, value: Callable[[Params], object]
) -> Iterator[SuggestedSettings]:
    """Yields one change that sets a hyperparameter in every stack that has another value."""
    settings = {}
    for name in ("encoder", "decoder"):
        # A language model has only a decoder.
        if name not in experiment.task:
            continue
        stack = experiment.task.get(name)
        applies = "moe" not in path or _has_capacity_limit(stack)
        if applies and stack.get(path) != value(stack):
            settings[f"task.{name}.{path}"] = value(stack)
    if settings:
        yield SuggestedSettings(settings)


def _has_capacity_limit(stack: Params) -> bool:
    """Returns whether the stack's experts drop tokens when their capacity slots are full."""
    if not (stack.moe_every and issubclass(stack.moe.cls, MixtureOfExperts)):
        return False
    return stack.moe.cls.has_capacity_factor(stack.moe)


def _smaller_capacity_factor(stack: Params) -> float:
    factor = stack.moe.router.capacity_factor or _MIN_CAPACITY_FACTOR
    return min(factor, _MIN_CAPACITY_FACTOR)
