"""Prints the results of the benchmarks as tables."""

from __future__ import annotations

import rich.box
import rich.console
import rich.table

from lingvo_gshard.api import tables
from lingvo_gshard.tools.benchmarks import moe, step


def print_step_table(console: rich.console.Console, rows: list[step.StepTiming]) -> None:
    """Prints the rows of `gshard-bench step`."""
    table = make_table(
        "ratio: to the rate of a matrix product",
        "training step",
        "GFLOP",
        "seconds",
        "GFLOP/s",
        "product",
        "ratio",
        "compile",
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.flops / 1e9:,.1f}",
            f"{row.seconds:.4f}",
            f"{row.flops / row.seconds / 1e9:,.1f}",
            f"{row.gemm_rate / 1e9:,.1f}",
            f"{row.ratio:.1%}",
            f"{row.compile_seconds:.1f}",
        )
    tables.print_table(console, table)


def print_moe_table(console: rich.console.Console, rows: list[moe.LayerTiming]) -> None:
    """Prints the rows of `gshard-bench moe`."""
    caption = "to dense: to the time of a dense layer of the same active FLOPs; routing: share of "
    caption += "all but the experts' products; GEMM: useful FLOPs to the rate of a matrix product; "
    caption += "MiB: of temporaries"
    table = make_table(
        caption,
        "experts, dispatch, load",
        "capacity",
        "ms",
        "to dense",
        "routing",
        "GEMM",
        "dropped",
        "MiB",
    )
    for group in moe.by_experts(rows):
        for row in group:
            table.add_row(
                f"{row.experts}, {row.dispatch}, {row.load}",
                f"{row.capacity_factor:g}" if row.capacity_factor else "-",
                f"{row.milliseconds:,.0f}",
                f"{row.ratio_to_dense:.2f}",
                f"{row.routing_share:.1%}",
                f"{row.gemm_ratio:.0%}",
                f"{row.dropped_share:.1%}",
                f"{row.temporary_bytes / 2**20:,.0f}",
            )
        table.add_section()
    tables.print_table(console, table)


def make_table(caption: str, what: str, *headings: str) -> rich.table.Table:
    """Returns a table with one column of names and right-aligned columns of numbers."""
    table = rich.table.Table(box=rich.box.SIMPLE, caption=caption)
    table.add_column(what)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
