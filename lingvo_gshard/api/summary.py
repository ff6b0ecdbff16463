"""Prints the summary of a run before its first step."""

from __future__ import annotations

import math

import numpy as np
import rich.console
import rich.table

from lingvo_gshard.api import tables
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.input import Batch, Input
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.training.experiments import first_batch
from lingvo_gshard.training.run.runtime_protocol import Runtime
from lingvo_gshard.training.step.trainer import Trainer


def print_summary(
    console: rich.console.Console, params: Params, input_: Input, trainer: Trainer, runtime: Runtime
) -> None:
    """Prints the experiment, the model's size, the devices, and how the corpus was cleaned."""
    total = sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten())
    active = trainer.task.active_parameters()
    table = rich.table.Table.grid(padding=(0, 2))
    table.add_row("experiment", params.name)
    table.add_row("parameters", f"{total:,} in all, {active:,} used by each token")
    table.add_row("devices", runtime.device_summary)
    sizes = input_.vocabulary_sizes()
    if sizes:
        table.add_row("vocabulary", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    filled = share_filled(first_batch(input_, trainer.p.seed))
    if filled is not None:
        table.add_row("packing", f"{filled:.1%} of a batch's positions hold tokens")
    table.add_row("steps", f"{trainer.steps:,}")
    tables.print_table(console, table)
    if input_.report is not None:
        print_report(console, input_.report)
    for note in input_.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def print_report(console: rich.console.Console, report: CleaningReport) -> None:
    """Prints how many training rows were kept and dropped, with an example of each reason."""
    table = rich.table.Table("training rows", rich.table.Column("", justify="right"))
    for what, count in report.to_table():
        table.add_row(what, f"{count:,}")
    tables.print_table(console, table)
    for reason, example in sorted(report.examples.items()):
        text = f"{reason}, for example {example}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def share_filled(batch: Batch) -> float | None:
    """Returns the share of positions that hold tokens; None for a batch without segments."""
    segments = [value for name, value in batch.items() if name.endswith("_segments")]
    if not segments:
        return None
    filled = sum(np.count_nonzero(value) for value in segments)
    return filled / sum(value.size for value in segments)
