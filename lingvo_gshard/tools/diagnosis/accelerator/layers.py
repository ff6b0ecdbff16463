"""The checks of training steps of one layer: measured, and planned for this very machine."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Iterator

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core import SILENT, Params
from lingvo_gshard.runtime import chosen_for, memory_bytes, platform_of, traits_of
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.tools.benchmarks.card.measure import profiled_step
from lingvo_gshard.tools.benchmarks.exported import SavedStep
from lingvo_gshard.tools.benchmarks.timing import pipelined_seconds
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing
from lingvo_gshard.training import experiments
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.dropless.exchanges import EXCHANGES
from lingvo_gshard.wings.planning import planned_program, planner
from lingvo_gshard.wings.planning.compiling.cache import OptimizedHlo
from lingvo_gshard.wings.planning.planned_program import PlannedProgram
from lingvo_gshard.wings.profiling.comparison import calibrate
from lingvo_gshard.wings.profiling.profile import Rate

DENSE = "layer, dense"
# Names of checks of layers with experts -> the exchange.
MIXTURES = {f"layer, experts, {name}": name for name in EXCHANGES}
_EXPERIMENTS = {
    "dense": "language_model.one_gpu_dense",
    "experts": "language_model.one_gpu_experts",
}
_ROWS_PER_DEVICE = 4
_EXPERTS = 8
_WARM_UP, _STEPS = 3, 5
# Sizes where devices are virtual.
_SMALL = (
    "task.model_dim = 32",
    "task.decoder.num_heads = 2",
    "task.decoder.hidden_dim = 64",
    "task.decoder.layer.self_attention.head_dim = 16",
    "task.decoder.layer.self_attention.num_key_value_heads = 2",
    "input.length = 32",
)
_NOT_FINITE = "do not train with this step: see docs/debugging.md"


def check_layer(name: str, machine: Machine) -> Iterator[Check]:
    """Yields the check of the training step of a model of one layer."""
    exchange = MIXTURES.get(name)
    params = _params(exchange, machine)
    with tempfile.TemporaryDirectory(prefix="gshard-doctor-") as folder:
        program, step = _compiled(params, machine, pathlib.Path(folder) / "train_step.zip")
    losses = [step()() for _ in range(_WARM_UP)]
    seconds = pipelined_seconds(step, _STEPS)
    losses.append(step()())
    if not all(map(math.isfinite, losses)):
        found = f"the loss is {losses[0]:.4g}, and {losses[-1]:.4g} after {_WARM_UP + _STEPS} steps"
        yield Check(name, State.FAILURE, found, _NOT_FINITE, Timing(seconds))
        return
    planned, ratios = _compared(name, program, step, machine)
    found = f"finite losses, {losses[0]:.4g} and then {losses[-1]:.4g}{ratios}"
    yield Check(name, State.OK, found, "", Timing(seconds, planned))


def _params(exchange: str | None, machine: Machine) -> Params:
    """Returns a language model of one layer: dense, or with experts and an exchange."""
    kind = "experts" if exchange else "dense"
    params = experiment(_EXPERIMENTS[kind], _SMALL if machine.is_virtual else (), ())
    params.input.batch_rows = _ROWS_PER_DEVICE * machine.count
    params.input.vocabulary.size = 64 if machine.is_virtual else 4096
    params.task.decoder.num_layers = 1
    if exchange:
        moe = params.task.decoder.moe
        moe.num_experts = math.lcm(_EXPERTS, machine.count)
        moe.group_size = params.input.length
        moe.router.capacity_factor = 0.0
        moe.dispatch = DroplessDispatch.params().set(exchange=exchange)
    return params


def _compiled(
    params: Params, machine: Machine, path: pathlib.Path
) -> tuple[PlannedProgram, SavedStep]:
    """Returns the training step as it is planned, and as it runs with made-up weights."""
    device = machine.devices[0]
    partitioning = Partitioning.make(f"data={machine.count}", "expert")
    partitioning = partitioning.on(platform_of(device), device.device_kind)
    trainer = experiments.make_trainer(params)
    batch = experiments.batch_specs(params)
    planned = planned_program.lower_step(trainer, batch, partitioning, params.name, "gspmd")
    layers = planned_program.layer_names(trainer.task)
    dataclasses.replace(planned.program, layers=layers).save(path)
    traits = traits_of(trainer, partitioning.with_padded_state())
    options = chosen_for(device, (), traits, planned.program)
    return planned, SavedStep(str(path), SILENT, options=options)


def _compared(
    name: str, program: PlannedProgram, step: SavedStep, machine: Machine
) -> tuple[float | None, str]:
    """Returns the time of a step by plan, and the ratios to it of each kind of work in words."""
    topology = machine.topology
    if topology is None:
        return None, "; plans know no such machine"
    compiled = OptimizedHlo(
        proto=hlo.read_proto(step.compiled),
        memory=memory_bytes(step.compiled),
        seconds=step.compile_seconds,
        full_replications=[],
    )
    plan = planner.plan_program(program, None, topology, options=step.options, compiled=compiled)
    rate = Rate(flops_per_second=topology.chip.peak(machine.dtype), source="published")
    profile, _ = profiled_step(step, name, rate)
    ratios = calibrate(profile, plan)
    kinds = ", ".join(f"{row.kind} x{row.ratio:.2g}" for row in ratios.kinds) if ratios else ""
    return plan.seconds_per_step, f"; by plan: {kinds}" if kinds else ""
