"""gshard-inspect --logdir: what the weights of a trained run are like."""

from __future__ import annotations

import dataclasses
from typing import Any

import rich.console
from absl import flags

from lingvo_gshard.api import tables as api_tables
from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console.terminal_progress import stages_on_terminal
from lingvo_gshard.tools.inspection import tables
from lingvo_gshard.tools.inspection.weights import StoredWeights, WeightStatistics, statistics
from lingvo_gshard.training.step.trainer import Trainer


def define_trained_flags(values: flags.FlagValues) -> None:
    """Defines --logdir, --step, --compare and --compare_step."""
    flags.DEFINE_string(
        "logdir", None, "A trained run to inspect, in place of --experiment.", flag_values=values
    )
    flags.DEFINE_integer(
        "step", None, "Checkpoint of --logdir; by default the newest.", 0, flag_values=values
    )
    flags.DEFINE_string(
        "compare", None, "Another run, whose weights are compared.", flag_values=values
    )
    flags.DEFINE_integer(
        "compare_step",
        None,
        "Checkpoint of --compare; by default its newest. Alone: another step of --logdir.",
        0,
        flag_values=values,
    )


def inspect(
    values: flags.FlagValues, console: rich.console.Console
) -> tuple[Params, Trainer, dict[str, Any]]:
    """Prints the statistics of a run's weights.

    Returns:
      The run's experiment, its trainer with the run's vocabularies, and what was printed as a
      record for JSON.

    Raises:
      UserError: a flag does not suit a run, or a checkpoint is missing or damaged.
    """
    for flag in ("experiment", "gin_file", "gin_param"):
        if values[flag].value:
            raise UserError(f"--{flag} does not go with --logdir: a run has its own settings")
    with stages_on_terminal() as stages:
        stages.begin("Reading the weights")
        run = Run(values.logdir)
        stored = StoredWeights.open(run.logdir.checkpoints, values.step, "step")
        other = _compared(values, run)
        with run.open_checkpoints() as (_, trainer):
            specs = dict(trainer.theta_specs.flatten_items())
        for weights, place in ((stored, values.logdir), (other, values.compare)):
            if weights and (missing := sorted(specs.keys() - weights.paths)):
                raise UserError(f"{place} has no weight {missing[0]}, which --logdir declares")
        rows = list(statistics(stored, specs, other))
    head = f"{run.params.name}, step {stored.checkpoint.step:,}"
    if other:
        compared = values.compare or values.logdir
        head += f", compared with step {other.checkpoint.step:,} of {compared}"
    tables.say(console, f"{head}:")
    _print(console, rows)
    record = {
        "experiment": run.params.name,
        "step": stored.checkpoint.step,
        "statistics": [dataclasses.asdict(row) for row in rows],
    }
    if other:
        record["compared_step"] = other.checkpoint.step
    return run.params, trainer, record


def _compared(values: flags.FlagValues, run: Run) -> StoredWeights | None:
    """Returns the checkpoint to compare with; None if none is asked for."""
    if values.compare is None and values.compare_step is None:
        return None
    other = run if values.compare is None else Run(values.compare)
    return StoredWeights.open(other.logdir.checkpoints, values.compare_step, "compare_step")


def _print(console: rich.console.Console, rows: list[WeightStatistics]) -> None:
    has_difference = any(row.difference for row in rows)
    more = ("change", "largest change") if has_difference else ()
    heads = ("mean", "deviation", "largest", "zeros", "not finite", *more)
    table = tables.make_table("weight", "layout", "shape", "type", right=heads)
    for row in rows:
        cells = [
            tables.escape(row.path),
            row.layout,
            ",".join(map(str, row.shape)),
            row.dtype,
            f"{row.mean:.2e}",
            f"{row.deviation:.2e}",
            f"{row.largest:.2e}",
            f"{row.zeros:.1%}",
            f"{row.not_finite:,}" if row.not_finite else "",
        ]
        if change := row.difference:
            cells += ["equal"] if change.is_equal else [f"{change.relative:.1e}"]
            cells += [f"{change.largest:.1e}"]
        table.add_row(*cells)
    api_tables.print_table(console, table)
    bad = [row for row in rows if row.not_finite]
    for row in bad:
        tables.say(
            console, f"Warning: {row.path} has {row.not_finite:,} values that are not finite"
        )
