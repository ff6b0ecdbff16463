"""Prints a profile: what stands out first, then time by kind, layer, operation and device."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from lingvo_gshard.tools.console import MAX_ROWS, Console, units
from lingvo_gshard.wings.planning.operation_rows import COLLECTIVES
from lingvo_gshard.wings.profiling import profile as profiles
from lingvo_gshard.wings.profiling.comparison import Comparison
from lingvo_gshard.wings.profiling.files import CALIBRATION, COMPARISON, SUMMARY

if TYPE_CHECKING:
    from lingvo_gshard.wings.profiling.observer import ProfileResult


_NUMBERS = ("predicted", "measured", "measured by predicted")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the comparison by kind of work and by layer."""
    kinds = [(row.part, *_cells(row.predicted, row.measured)) for row in comparison.kinds]
    predicted = sum(row.predicted for row in comparison.kinds)
    measured = sum(row.measured for row in comparison.kinds)
    step = ("step", *_cells(comparison.predicted, comparison.measured))
    sums = [("all operations", *_cells(predicted, measured)), step]
    console.print_rows(("plan and profile",), _NUMBERS, kinds, below=sums)
    rows = [
        (escape(row.part or "(no layer)"), row.phase, *_cells(row.predicted, row.measured))
        for row in comparison.layers
    ]
    console.print_rows(("plan and profile of a layer", "phase"), _NUMBERS, rows[:MAX_ROWS])
    hidden = comparison.layers[MAX_ROWS:]
    console.say_hidden(hidden, lambda row: row.measured, units.in_seconds, COMPARISON)
    console.say(
        "\nA plan knows neither waiting for input, nor pauses between operations, nor the host."
    )


def _cells(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{units.digits(measured / predicted)}x" if predicted else ""
    return units.in_seconds(predicted), units.in_seconds(measured), ratio


def print_result(result: ProfileResult, console: Console) -> None:
    """Prints a profile, the comparison with a plan if there is one, and the files written."""
    print_profile(result.profile, console)
    if result.comparison is not None:
        print_comparison(result.comparison, console)
    _print_files(result, console)


def print_profile(profile: profiles.Profile, console: Console) -> None:
    """Prints a profile. Long tables are cut and give the number of hidden rows."""
    _print_totals(console, profile)
    _print_parts(console, profile)
    _print_layers(console, profile.layers)
    _print_operations(console, profile.slowest)
    _print_collectives(console, profile.collectives)
    _print_devices(console, profile.per_device)
    console.say("")
    for finding in profile.findings:
        console.say(finding)


def _print_files(result: ProfileResult, console: Console) -> None:
    """Prints where the files of a profile are, and what opens them."""
    files = result.files
    console.say(f"\nSummary: {files.path / SUMMARY}")
    if result.calibration is not None:
        console.say(f"Calibration: gshard-plan --calibration={files.path / CALIBRATION}")
    elif result.comparison is not None:
        console.say("No calibration: the plan's estimates were calibrated already.")
    console.say(f"XProf: xprof --logdir={files.root}, or the profile plugin of TensorBoard")
    console.say(f"Perfetto: open {files.perfetto} on https://ui.perfetto.dev")


def _print_totals(console: Console, profile: profiles.Profile) -> None:
    first, last = profile.first_step, profile.last_step
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    console.say(
        f"\nProfile of {steps} of {profile.name}: {units.in_seconds(profile.seconds_per_step)} a "
        f"step on {profile.device_summary}",
        style="bold",
    )
    rate = f"{units.in_flops(profile.useful_rate)}/s"
    if profile.attainable is None:
        console.say(f"The model's formulas are computed at {rate}.")
    else:
        attainable = profile.attainable
        share = units.in_share(profile.useful_rate / attainable.flops_per_second)
        console.say(
            f"The model's formulas are computed at {rate}, {share} of the attainable "
            f"{units.in_flops(attainable.flops_per_second)}/s ({attainable.source})."
        )
    console.say(
        f"The process kept {units.digits(profile.busy_cores)} of {profile.cores} cores busy."
    )


def _print_parts(console: Console, profile: profiles.Profile) -> None:
    cells = []
    for part in profile.parts:
        rate, attainable = part.flops_per_second, profile.attainable
        of = units.in_share(rate / attainable.flops_per_second) if rate and attainable else ""
        figures = (units.in_seconds(part.seconds), units.in_share(part.share))
        cells.append((part.part, *figures, f"{units.in_flops(rate)}/s" if rate else "", of))
    total = sum(part.seconds for part in profile.parts)
    sums = ("sum", units.in_seconds(total), units.in_share(1.0), "", "")
    right = ("measured", "share", "FLOP/s", "of attainable")
    console.print_rows(("time of a step",), right, cells, below=[sums])


def _print_layers(console: Console, layers: Sequence[profiles.LayerTime]) -> None:
    cells = []
    for row in layers[:MAX_ROWS]:
        rate = f"{units.in_flops(row.flops / row.seconds)}/s" if row.flops else ""
        figures = (units.in_seconds(row.seconds), units.in_share(row.share), rate)
        cells.append((escape(row.layer or "(no layer)"), row.phase, *figures))
    phases: dict[str, float] = collections.defaultdict(float)
    shares: dict[str, float] = collections.defaultdict(float)
    for row in layers:
        phases[row.phase] += row.seconds
        shares[row.phase] += row.share
    sums = [
        ("all", phase, units.in_seconds(seconds), units.in_share(shares[phase]), "")
        for phase, seconds in sorted(phases.items(), key=lambda item: -item[1])
    ]
    left, right = ("time of a layer", "phase"), ("measured", "share", "FLOP/s")
    console.print_rows(left, right, cells, below=sums)
    console.say_hidden(layers[MAX_ROWS:], lambda row: row.seconds, units.in_seconds, SUMMARY)


def _print_operations(console: Console, rows: Sequence[profiles.OperationTime]) -> None:
    cells = []
    for row in rows:
        where = f"{row.layer or '(no layer)'}, {row.phase}"
        source = f"\n  {row.source}" if row.source else ""
        name = escape(f"{row.name} ({row.opcode})\n  {where}{source}")
        rate = f"{units.in_flops(row.flops / row.active_seconds)}/s" if row.flops else ""
        figures = (units.digits(row.executions), units.in_seconds(row.seconds), rate)
        cells.append((name, row.kind, *figures))
    console.print_rows(("slowest operations", "kind"), ("times", "measured", "FLOP/s"), cells)


def _print_collectives(console: Console, rows: Sequence[profiles.CollectiveTime]) -> None:
    if not rows:
        return
    cells = [
        (
            *(escape(f"{row.kind} over {row.axis}"), units.in_count(row.count)),
            *(units.in_bytes(row.bytes), units.in_seconds(row.seconds)),
            units.in_share(row.hidden_seconds / row.seconds if row.seconds else 0.0),
            units.in_seconds(row.exposed_seconds),
        )
        for row in rows
    ]
    right = ("calls", "a step", "active", "hidden", "exposed")
    console.print_rows(("collectives",), right, cells)


def _print_devices(console: Console, rows: Sequence[profiles.DeviceTime]) -> None:
    if len(rows) < 2:
        return
    waits = (COLLECTIVES, profiles.PAUSES, profiles.INPUT_WAIT, profiles.HOST)
    cells = []
    for row in rows[:MAX_ROWS]:
        computes = sum(row.seconds.get(part, 0.0) for part in profiles.PARTS if part not in waits)
        seconds = (computes, *(row.seconds.get(part, 0.0) for part in waits))
        cells.append((str(row.device), *map(units.in_seconds, seconds)))
    console.print_rows(("device",), ("computes", *waits), cells)
    if len(rows) > MAX_ROWS:
        console.say(f"and {len(rows) - MAX_ROWS} more devices")
