"""Measures the step of a folder that gshard-bench fill wrote, and compares it with its plan."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.tools.benchmarks import common, exported
from lingvo_gshard.tools.benchmarks.card.measure import CardRow, measure
from lingvo_gshard.tools.console import output, transient_stages, units
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.profile_reports.profile_report import print_comparison

OPERAND = ("folder", "write it with gshard-bench fill --folder=FOLDER")

define_flags = maker(
    json=output.json_flag(), repeats=common.REPEATS, gemm_size=common.gemm_size(None)
)


def run(values: flags.FlagValues, console: output.Console, folder: str) -> int:
    """Measures, prints what was found, writes the row, and returns the exit code."""
    with transient_stages(console, "starting") as progress:
        row = measure(folder, values.repeats, values.gemm_size, progress)
    device = exported.device()
    _print_measured(row, device, console)
    return common.write(values, [row], device)


def _print_measured(row: CardRow, device: str, console: output.Console) -> None:
    measured, card = row.measured, row.card
    seconds, planned = measured.step_seconds, row.planned_seconds
    in_use = measured.memory_in_use
    used = "not counted by jax here" if in_use is None else units.in_bytes(in_use)
    rate = f"{measured.gemm_rate / 1e12:,.4g} TFLOP/s"
    cells = (
        ("experiment", f"{card.experiment}, {card.grown} = {card.value:,}", ""),
        ("device", device, card.topology),
        ("time of a step", units.in_seconds(seconds), units.in_seconds(planned)),
        ("tokens", f"{measured.tokens_per_second:,.0f}/s", f"{measured.tokens / planned:,.0f}/s"),
        ("product", f"{rate}, {measured.gemm_size} x {measured.gemm_size}", measured.gemm_dtype),
        ("MFU", f"{measured.mfu:.1%} of the product", f"goal {row.goal:.0%}"),
        ("peak memory", used, units.in_bytes(row.planned_peak)),
        ("as compiled here", units.in_bytes(measured.peak_bytes), ""),
        ("loss", f"{measured.first_loss:.4f}, then {measured.last_loss:.4f}", ""),
    )
    console.print_rows(("step",), ("measured", "planned"), cells)
    print_comparison(row.comparison, console)
    gaps = [
        (
            gap.part,
            *map(units.in_seconds, (gap.predicted, gap.measured, gap.seconds)),
            f"{gap.share:.1%}",
        )
        for gap in row.layer_gaps
    ]
    headings = ("predicted", "measured", "beyond plan", "share of step")
    console.print_rows(("largest gaps of layers",), headings, gaps)
    for sentence in row.findings:
        console.say(sentence)
