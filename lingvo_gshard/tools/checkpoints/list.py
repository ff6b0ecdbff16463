"""Lists the checkpoints of a run with their sizes, and which one is the best."""

from __future__ import annotations

import rich.table
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.run import LOGDIR, required_logdir
from lingvo_gshard.training import Logdir
from lingvo_gshard.wings.services import inventory
from lingvo_gshard.wings.services.inventory import CheckpointFacts

define_flags = maker(logdir=LOGDIR, json=output.json_flag("the checkpoints"))


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    found = checkpoints_of(required_logdir(values))
    table = rich.table.Table("step", rich.table.Column("MB", justify="right"), "files", "")
    for one in found:
        note = one.problem or ("best" if one.is_best else "")
        table.add_row(f"{one.step:,}", f"{one.bytes / 1e6:,.1f}", f"{one.files:,}", note)
    tables.print_table(console, table)
    output.write_json(values.json, found)
    return 0


def checkpoints_of(logdir: str) -> list[CheckpointFacts]:
    """Returns the checkpoints of a run; UserError if there are none."""
    place = Logdir(logdir)
    found = inventory.facts(place.checkpoints)
    if not found:
        raise UserError(f"--logdir={logdir} has no checkpoints")
    return found
