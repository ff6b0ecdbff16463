"""Copies a checkpoint of a run to another directory or bucket, which is a run of its own then."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core import UserError, objects
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.run import CHECKPOINT, LOGDIR, required_logdir
from lingvo_gshard.training import Logdir, preferred
from lingvo_gshard.wings.services import inventory

define_flags = maker(
    logdir=LOGDIR,
    checkpoint=CHECKPOINT,
    output="Directory or bucket of the copy; created if it is new.",
    json=output.json_flag("what was copied"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    source = Logdir(required_logdir(values))
    if not values.output:
        raise UserError("--output is missing: the directory or bucket of the copy")
    steps = preferred(source.checkpoints, values.checkpoint)
    if not steps:
        raise UserError(f"--logdir={values.logdir} has no checkpoints")
    target, step = Logdir(values.output), steps[0]
    if target.has_checkpoints() and target.params_as_text() != source.params_as_text():
        raise UserError(f"--output={values.output} holds another run; choose another directory")
    copied = inventory.copy(source.checkpoints, target.checkpoints, step)
    name = source.params.name
    objects.write_bytes(f"{target.place}/{name}", objects.read_bytes(source.params))
    console.say(
        f"Copied the checkpoint of step {step:,} ({copied / 1e6:,.1f} MB) to {values.output}"
    )
    output.write_json(values.json, {"step": step, "bytes": copied, "output": values.output})
    return 0
