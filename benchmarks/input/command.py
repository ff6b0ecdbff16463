"""Measures how fast text is prepared and read, and how long training steps wait for batches.

    python -m benchmarks input --rows=20000000 --workers=2 --json=input.json
    python -m benchmarks input --prepared=prepared/large

prepares made text with gshard-prepare: rows per second, and the memory of all processes together,
which depends on --workers and not on --rows. Then it reads what was prepared, or the directory
--prepared (docs/data.md): tokens per second, the share of positions that hold tokens, and the share
of time that the quickstart's training steps wait for batches.
"""

from __future__ import annotations

import tempfile

from absl import flags

from benchmarks import common
from benchmarks.input import preparation, training
from lingvo_gshard.tools.console import Console, transient_stages
from lingvo_gshard.tools.flags.definitions import define, integer


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags(experiment=False)
    define(
        values,
        rows=integer("Rows of made text to prepare.", 1_000_000, 1),
        workers=integer("Processes that prepare them.", 2, 1),
        prepared="Prepared sentence pairs to read instead of made text.",
    )
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the tables, writes the rows, and returns the exit code."""
    rows, directory = [], values.prepared
    with tempfile.TemporaryDirectory(prefix="gshard-bench-") as folder:
        if directory is None:
            directory = f"{folder}/prepared"
            with transient_stages(console, "starting") as progress:
                row = preparation.measure(values.rows, values.workers, folder, progress)
            preparation.print_row(console, row)
            rows.append(row)
        with transient_stages(console, "starting") as progress:
            found = training.measure(directory, progress)
    training.print_table(console, found)
    return common.write(values, [*rows, *found], "CPU")
