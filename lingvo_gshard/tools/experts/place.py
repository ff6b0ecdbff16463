"""Places the experts of a run on devices as a plan advises."""

from __future__ import annotations

import numpy as np
from absl import flags

from lingvo_gshard.core import UserError, explained
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.experts import source_run
from lingvo_gshard.tools.experts.source_run import SourceRun
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.run import LOGDIR
from lingvo_gshard.wings.fine_tuning.surgery import expert_placement, pruning
from lingvo_gshard.wings.planning.loads.file import RouterLoads
from lingvo_gshard.wings.planning.plan import plan
from lingvo_gshard.wings.services.routers.counts import watched_layers

define_flags = maker(
    logdir=LOGDIR,
    output=source_run.OUTPUT,
    plan="The plan with the placement, which gshard-plan --loads --json wrote.",
    json=output.json_flag("what was written"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    source_run.check_output(values.output)
    loads = _loads(values.plan)
    with source_run.opened(values, console) as run:
        source = SourceRun.read(run)
    layers = watched_layers(source.trainer.task)
    with explained(f"--plan={values.plan}", UserError):
        orders = {
            row.layer: expert_placement.order_of(row.layer, row.placement, layers)
            for row in loads.layers
        }
    checkpoint = source.checkpoint
    trainer = source.trainer
    state = pruning.pruned_state(trainer, trainer, checkpoint.theta, checkpoint.moments, orders)
    source.write(values.output, run.params, state, checkpoint.step)
    for row in loads.layers:
        console.say(f"{row.layer}: {_in_words(row.placement)}")
    console.say(f"the run is in {values.output}")
    record = {"logdir": values.output, "step": checkpoint.step}
    record["experts"] = {layer: order.tolist() for layer, order in orders.items()}
    output.write_json(values.json, record)
    return 0


def _loads(path: str | None) -> RouterLoads:
    """Returns the loads of the plan in a file; ValueError if it has none."""
    if not path:
        raise UserError("--plan is missing: the file that gshard-plan --loads --json wrote")
    found = plan.load(path).loads
    if found is None:
        raise UserError(f"--plan={path} has no placement of experts; plan with gshard-plan --loads")
    return found


def _in_words(placement: list[list[int]]) -> str:
    order = np.concatenate(placement)
    if np.array_equal(order, np.arange(len(order))):
        return f"{len(order)} experts stay where they are"
    devices = (", ".join(map(str, experts)) for experts in placement)
    return f"experts {' | '.join(devices)}"
