"""Deletes the older checkpoints of a run. The best one is kept."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.tools.checkpoints.list import checkpoints_of
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import integer, maker
from lingvo_gshard.tools.flags.options import DRY_RUN
from lingvo_gshard.tools.flags.run import LOGDIR, required_logdir
from lingvo_gshard.training import Logdir
from lingvo_gshard.wings.services import inventory

define_flags = maker(
    logdir=LOGDIR,
    keep=integer("Number of newest checkpoints to keep.", 3, 1),
    dry_run=DRY_RUN,
    json=output.json_flag("the steps of the deleted checkpoints"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    sizes = {one.step: one.bytes for one in checkpoints_of(required_logdir(values))}
    place = Logdir(values.logdir)
    steps = inventory.prunable(place.checkpoints, values.keep)
    if steps and not values.dry_run:
        with place.locked(console.say):
            inventory.delete(place.checkpoints, steps)
    verb = "Would delete" if values.dry_run else "Deleted"
    shown = ", ".join(f"{step:,}" for step in steps) or "none"
    freed = sum(sizes[step] for step in steps) / 1e6
    console.say(f"{verb} the checkpoints of steps: {shown} ({freed:,.1f} MB)")
    output.write_json(values.json, steps)
    return 0
