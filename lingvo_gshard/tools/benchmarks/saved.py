"""Measures the speed of a saved training step, relative to matrix products on the same devices."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.tools.benchmarks import common, exported
from lingvo_gshard.tools.console import output, transient_stages
from lingvo_gshard.tools.flags.definitions import maker

OPERAND = ("file", "write it with gshard-inspect --program=train_step.zip")

define_flags = maker(
    json=output.json_flag(),
    repeats=common.REPEATS,
    gemm_size=common.gemm_size(None),
    init_state="File of the init_state program that makes the weights.",
)


def run(values: flags.FlagValues, console: output.Console, file: str) -> int:
    """Measures, prints what was found, writes the row, and returns the exit code."""
    with transient_stages(console, "starting") as progress:
        row = exported.measure(file, values.init_state, values.repeats, values.gemm_size, progress)
    device = exported.device()
    extremes = f"{row.fastest_seconds * 1e3:,.2f} to {row.slowest_seconds * 1e3:,.2f}"
    where = f"{row.devices} x {device}" + (f" as {row.mesh}" if row.mesh else "")
    product = f"{row.gemm_rate / 1e12:,.4g} TFLOP/s, {row.gemm_size} x {row.gemm_size}"
    facts = (
        ("training step", row.file),
        ("devices", where),
        ("step", f"{row.step_seconds * 1e3:,.2f} ms, median; {extremes}"),
        ("tokens", f"{row.tokens_per_second:,.0f}/s, {row.tokens:,} in a step"),
        ("useful", f"{row.flops / 1e12:,.4g} TFLOP in a step"),
        ("product", f"{product}, {row.gemm_dtype}"),
        ("MFU", f"{row.mfu:.1%} of the product's rate"),
        ("compiled in", f"{row.compile_seconds:.1f} s"),
        ("memory", f"{row.peak_bytes / 2**20:,.0f} MiB on each device"),
        ("loss", f"{row.first_loss:.4f}, then {row.last_loss:.4f}"),
    )
    tables.print_facts(console, facts)
    return common.write(values, [row], device)
