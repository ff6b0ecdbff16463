"""The subcommands `fill` and `card` of gshard-bench: flags, and what they print."""

from __future__ import annotations

import math
import typing

import rich.console
from absl import flags

from lingvo_gshard.core import UserError
from lingvo_gshard.tools.benchmarks.card.folder import CardRecord
from lingvo_gshard.tools.benchmarks.card.measure import Gap
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.console.output import say
from lingvo_gshard.tools.console.stages import planning_stages, transient_stages
from lingvo_gshard.tools.console.tables import make_table, print_table
from lingvo_gshard.tools.flags.definitions import Flags, decimal, refuse, repeated, string
from lingvo_gshard.tools.profile_reports.profile_report import print_comparison
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan

if typing.TYPE_CHECKING:
    from lingvo_gshard.tools.benchmarks.card.measure import CardRow

FILL, CARD = "fill", "card"
EXPERIMENTS = ("language_model.one_gpu_dense", "language_model.one_gpu_experts")


def card_flags() -> Flags:
    """Returns the flags of `fill` that no other subcommand has."""
    return dict(
        topology="The card that `fill` fills, such as gpu:h100:1x1 or cpu:1.",
        folder="Folder that `fill` writes the step to, for `card`.",
        grow=string("The setting that `fill` makes as large as fits.", "task.decoder.num_layers"),
        gin_param=repeated("A setting of the experiment of `fill`; may be repeated.", []),
        share=decimal("Most of the card's memory that `fill` plans to use.", 0.9, 0, 1),
        memory_gib=decimal(
            "Memory of the card of `fill` in GiB; by default the published one.", least=0
        ),
    )


def run_fill(values: flags.FlagValues, console: rich.console.Console) -> tuple[str, CardRecord]:
    """Chooses and exports a step; returns the card's name and how the step was chosen."""
    from lingvo_gshard.tools.benchmarks.card.fill import Wanted, fill

    for name in ("folder", "topology"):
        if not values[name].value:
            raise UserError(f"fill needs --{name}, such as --topology=gpu:h100:1x1 --folder=dense")
    if not values["experiment"].present:
        known = " or ".join(f"--experiment={name}" for name in EXPERIMENTS)
        raise UserError(f"fill needs an experiment, such as {known}")
    topology = topologies.get(values.topology)
    memory = topology.chip.memory_bytes
    if values.memory_gib is not None:
        memory = math.ceil(values.memory_gib * 2**30)
    wanted = Wanted(
        values.experiment, values.gin_param, values.grow, topology, memory, values.share
    )
    with planning_stages(topology.compiler_choice) as shown:
        try:
            record, plan = fill(wanted, values.folder, shown)
        except OSError as error:
            raise UserError(
                f"--folder={values.folder} cannot be written: {error.strerror}"
            ) from None
    _print_filled(values.folder, record, plan, console)
    return topology.chip.name, record


def run_card(
    folders: list[str], values: flags.FlagValues, console: rich.console.Console
) -> tuple[str, CardRow]:
    """Measures the step of a folder; returns the device and the row."""
    from lingvo_gshard.tools.benchmarks import exported
    from lingvo_gshard.tools.benchmarks.card.measure import measure

    if len(folders) != 1:
        raise UserError(
            f"card takes one folder, {len(folders)} were given; write it with gshard-bench fill "
            "--folder=FOLDER"
        )
    gemm_size = values.gemm_size if values["gemm_size"].present else None
    with transient_stages(console, "starting") as progress:
        row = measure(folders[0], values.repeats, gemm_size, progress)
    _print_measured(row, exported.device(), console)
    return exported.device(), row


def check_flags(values: flags.FlagValues, subcommand: str) -> None:
    """Raises ValueError for flags of `fill` with another subcommand."""
    if subcommand != FILL:
        names = ("topology", "folder", "grow", "gin_param", "share", "memory_gib")
        refuse(values, names, f"applies to `{FILL}`, not to `{subcommand}`")


def _print_filled(
    folder: str, record: CardRecord, plan: Plan, console: rich.console.Console
) -> None:
    peak, share = plan.bytes_per_device.peak, plan.bytes_per_device.peak / record.memory
    say(
        console,
        f"{record.grown} = {record.value:,} fills {plan.chip}: planned peak "
        f"{units.in_bytes(peak)} of {units.in_bytes(record.memory)} ({share:.0%}), "
        f"{units.in_large(plan.parameters.total)} parameters.",
    )
    say(
        console,
        f"Planned: {units.in_seconds(plan.seconds_per_step)} for a step of "
        f"{units.in_count(plan.tokens_per_step)} tokens, MFU {units.in_share(plan.mfu)} of the "
        "published rate.",
    )
    say(console, f"Copy {folder} to the machine with the card and run gshard-bench card {folder}")


def _print_measured(row: CardRow, device: str, console: rich.console.Console) -> None:
    measured, card = row.measured, row.card
    table = make_table("step", right=("measured", "planned"))
    seconds, planned = measured.step_seconds, row.planned_seconds
    rate = f"{measured.gemm_rate / 1e12:,.4g} TFLOP/s"
    for name, value, plan in (
        ("experiment", f"{card.experiment}, {card.grown} = {card.value:,}", ""),
        ("device", device, card.topology),
        ("time of a step", units.in_seconds(seconds), units.in_seconds(planned)),
        (
            "tokens",
            f"{measured.tokens_per_second:,.0f}/s",
            f"{measured.tokens / planned:,.0f}/s",
        ),
        ("product", f"{rate}, {measured.gemm_size} x {measured.gemm_size}", measured.gemm_dtype),
        ("MFU", f"{measured.mfu:.1%} of the product", f"goal {row.goal:.0%}"),
        ("peak memory", _bytes(measured.memory_in_use), units.in_bytes(row.planned_peak)),
        ("as compiled here", units.in_bytes(measured.peak_bytes), ""),
        ("loss", f"{measured.first_loss:.4f}, then {measured.last_loss:.4f}", ""),
    ):
        table.add_row(name, value, plan)
    print_table(console, table)
    print_comparison(row.comparison, console)
    _print_gaps(row.layer_gaps, console)
    for sentence in row.findings:
        say(console, sentence)


def _print_gaps(gaps: list[Gap], console: rich.console.Console) -> None:
    table = make_table(
        "largest gaps of layers", right=("predicted", "measured", "beyond plan", "share of step")
    )
    for gap in gaps:
        seconds = map(units.in_seconds, (gap.predicted, gap.measured, gap.seconds))
        table.add_row(gap.part, *seconds, f"{gap.share:.1%}")
    print_table(console, table)


def _bytes(size: int | None) -> str:
    return "not counted by jax here" if size is None else units.in_bytes(size)
