"""Reads the checkpoints of a run and compares every array with its digest."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core import UserError
from lingvo_gshard.tools.checkpoints.list import checkpoints_of
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import integer, maker
from lingvo_gshard.tools.flags.run import LOGDIR, required_logdir
from lingvo_gshard.training import Logdir
from lingvo_gshard.wings.services import inventory

define_flags = maker(
    logdir=LOGDIR,
    step=integer("The checkpoint of this step alone.", least=0),
    json=output.json_flag("what was found"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    steps = [one.step for one in checkpoints_of(required_logdir(values))]
    if values.step is not None:
        if values.step not in steps:
            there = ", ".join(map(str, steps))
            raise UserError(f"--step={values.step}: the run has the checkpoints {there}")
        steps = [values.step]
    problems = {}
    for step in steps:
        problem = inventory.problem_of(Logdir(values.logdir).checkpoints, step)
        problems[step] = problem
        console.say(f"step {step:,}: {problem or 'intact'}")
    output.write_json(values.json, problems)
    return 2 if any(problems.values()) else 0
