"""Chooses a training step that fills a card by its plan, and exports it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
from absl import flags

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core import Params, Progress, UserError, explained
from lingvo_gshard.runtime import Program, platform_of
from lingvo_gshard.tools.benchmarks import common
from lingvo_gshard.tools.benchmarks.card.folder import CARD, PLAN, STEP, CardRecord
from lingvo_gshard.tools.console import output, stages_with_lines, units
from lingvo_gshard.tools.flags.definitions import decimal, maker, repeated, string
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.planning import planned_program, planner
from lingvo_gshard.wings.planning.experiments import PlanOptions, planned_partitioning
from lingvo_gshard.wings.planning.machines import cuda, topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan

EXPERIMENTS = ("language_model.one_gpu_dense", "language_model.one_gpu_experts")
_COMPILATIONS = 8

define_flags = maker(
    experiment="The experiment to fill a card with.",
    json=output.json_flag(),
    topology="The card, such as gpu:h100:1x1 or cpu:1.",
    folder="Folder to write the step to, for gshard-bench card.",
    grow=string("The setting to make as large as fits.", "task.decoder.num_layers"),
    gin_param=repeated("A setting of the experiment; may be repeated.", []),
    share=decimal("Most of the card's memory to plan for.", 0.9, 0, 1),
    memory_gib=decimal("Memory of the card in GiB; by default the published one.", least=0),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Chooses and exports a step, prints it, writes the row, and returns the exit code."""
    for name in ("folder", "topology"):
        if not values[name].value:
            raise UserError(f"fill needs --{name}, such as --topology=gpu:h100:1x1 --folder=dense")
    if not values.experiment:
        known = " or ".join(f"--experiment={name}" for name in EXPERIMENTS)
        raise UserError(f"fill needs an experiment, such as {known}")
    topology = topologies.get(values.topology)
    memory = topology.chip.memory_bytes
    if values.memory_gib is not None:
        memory = math.ceil(values.memory_gib * 2**30)
    wanted = Wanted(
        values.experiment, values.gin_param, values.grow, topology, memory, values.share
    )
    with stages_with_lines(topology.compiler_choice) as shown:
        with explained(f"--folder={values.folder} cannot be written", OSError):
            record, plan = fill(wanted, values.folder, shown)
    _print_filled(values.folder, record, plan, console)
    return common.write(values, [record], topology.chip.name)


def _print_filled(folder: str, record: CardRecord, plan: Plan, console: output.Console) -> None:
    peak, share = plan.bytes_per_device.peak, plan.bytes_per_device.peak / record.memory
    console.say(
        f"{record.grown} = {record.value:,} fills {plan.chip}: planned peak "
        f"{units.in_bytes(peak)} of {units.in_bytes(record.memory)} ({share:.0%}), "
        f"{units.in_large(plan.parameters.total)} parameters."
    )
    console.say(
        f"Planned: {units.in_seconds(plan.seconds_per_step)} for a step of "
        f"{units.in_count(plan.tokens_per_step)} tokens, MFU {units.in_share(plan.mfu)} of the "
        "published rate."
    )
    console.say(f"Copy {folder} to the machine with the card and run gshard-bench card {folder}")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Describes the fill of a card.

    Attributes:
      settings: the experiment's settings, as --gin_param takes them.
      grown: the setting to choose, such as "task.decoder.num_layers".
      memory: bytes of the card.
      share: the largest share of `memory` that the planned peak may take.
    """

    experiment: str
    settings: Sequence[str]
    grown: str
    topology: Topology
    memory: int
    share: float

    def params(self, value: int | None = None) -> Params:
        """Returns the experiment's Params, with the setting `grown` at `value` if it is given."""
        chosen = [] if value is None else [f"{self.grown} = {value}"]
        return experiment(self.experiment, [*self.settings, *chosen], [])


def fill(wanted: Wanted, folder: str, progress: Progress) -> tuple[CardRecord, Plan]:
    """Writes the largest step that fits, with its plan, to a folder.

    Raises:
      UserError: the setting is no number of the experiment, or nothing fits the card.
      OSError: the folder cannot be written.
    """
    first = _first_value(wanted)
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # The peak is checked here. XLA would compute products again well before the memory is full.
    is_gpu = wanted.topology.compiler == "gpu"
    options = {cuda.MEMORY_LIMIT: str(cuda.ALL_MEMORY)} if is_gpu else {}
    made: dict[int, tuple[Program, Plan]] = {}

    def peak(value: int) -> int:
        progress.begin(f"planning {wanted.grown} = {value:,}")
        made[value] = _planned(wanted.params(value), wanted.topology, options)
        return made[value][1].bytes_per_device.peak

    capacity = int(wanted.memory * wanted.share)
    value = largest(peak, capacity, first, _COMPILATIONS)
    if not value:
        least = made[min(made)][1].bytes_per_device.peak
        raise UserError(
            f"--grow={wanted.grown}: a step with {wanted.grown} = {min(made)} needs "
            f"{units.in_bytes(least)}, more than {units.in_bytes(capacity)}, {wanted.share:.0%} of "
            f"the memory of {wanted.topology.chip.name}; choose a smaller model by --gin_param"
        )
    program, plan = made[value]
    progress.begin("writing the step")
    record = CardRecord(
        experiment=wanted.experiment,
        settings=list(wanted.settings),
        grown=wanted.grown,
        value=value,
        topology=wanted.topology.name,
        memory=wanted.memory,
        share=wanted.share,
        options=options,
    )
    program.save(path / STEP)
    (path / PLAN).write_text(plan.to_json(), encoding="utf-8")
    (path / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record, plan


def _planned(
    params: Params, topology: Topology, options: Mapping[str, str]
) -> tuple[Program, Plan]:
    """Returns the training step of an experiment and its plan with options of the compiler."""
    device = topology.compile_devices()[0]
    partitioning = planned_partitioning(params, topology, PlanOptions())
    partitioning = partitioning.on(platform_of(device), device.device_kind)
    trainer = experiments.make_trainer(params)
    batch = experiments.batch_specs(params)
    planned = planned_program.lower_step(trainer, batch, partitioning, params.name, "gspmd")
    layers = planned_program.layer_names(trainer.task)
    plan = planner.plan_program(planned, partitioning, topology, options=options)
    return dataclasses.replace(planned.program, layers=layers), plan


def _first_value(wanted: Wanted) -> int:
    """Returns the experiment's own value of the setting to choose."""
    params = wanted.params()
    with explained(f"--grow={wanted.grown}", AttributeError, ValueError):
        value = params.get(wanted.grown)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"--grow={wanted.grown} is {value!r} in {wanted.experiment}; expected a positive "
            "integer, such as task.decoder.num_layers or input.batch_rows"
        )
    return value


def largest(bytes_of: Callable[[int], int], capacity: int, first: int, compilations: int) -> int:
    """Returns the largest integer whose bytes are within a capacity; 0 if not even 1 fits.

    Bytes grow with the integer, almost linearly: layers and rows take the same memory each. So the
    next integer to try is where the line through two known points reaches the capacity.

    Args:
      bytes_of: returns the bytes for an integer. Each call takes a compilation.
      capacity: the most bytes.
      first: the first integer to try.
      compilations: largest number of calls of `bytes_of`. If they do not suffice, the result is the
        largest integer that is known to fit.
    """
    known = {first: bytes_of(first)}
    while len(known) < compilations:
        fits = max((n for n, size in known.items() if size <= capacity), default=0)
        too_large = min((n for n, size in known.items() if size > capacity), default=None)
        if too_large == fits + 1:
            break
        guess = _where_line_reaches(known, capacity, first)
        guess = max(guess, fits + 1)
        if too_large is not None:
            guess = min(guess, too_large - 1)
        known[guess] = bytes_of(guess)
    return max((n for n, size in known.items() if size <= capacity), default=0)


def _where_line_reaches(known: dict[int, int], capacity: int, first: int) -> int:
    """Returns where the line through the two points next to the capacity reaches it."""
    if len(known) == 1:
        # A line takes a second point.
        return first * 2 if known[first] <= capacity else max(1, first // 2)
    (low, low_bytes), (high, high_bytes) = sorted(
        sorted(known.items(), key=lambda point: abs(point[1] - capacity))[:2]
    )
    if high_bytes <= low_bytes:
        return 2 * high
    return int(low + (capacity - low_bytes) * (high - low) / (high_bytes - low_bytes))
