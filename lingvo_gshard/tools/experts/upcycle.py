"""Initializes a model with experts from a trained dense model (sparse upcycling,
arXiv 2212.05055).
"""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core import Params, UserError, explained
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.experts import source_run
from lingvo_gshard.tools.experts.source_run import SourceRun
from lingvo_gshard.tools.flags.definitions import integer, maker, switch
from lingvo_gshard.tools.flags.run import SETTINGS
from lingvo_gshard.wings.fine_tuning.surgery import upcycling
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.inference.translator import Translator

define_flags = maker(
    logdir="Directory of the dense run.",
    output=source_run.OUTPUT,
    experts=integer("Number of experts per layer, 2 or more."),
    moe_every=integer(
        "Layers moe_every, 2 * moe_every, ... get experts. 0 uses task.<stack>.moe_every of "
        "the dense run, or 2 if that is 0.",
        0,
        0,
    ),
    **SETTINGS,
    exact=switch(
        "Whether to refuse options with which the new model would compute another function.", True
    ),
    restart=switch("Starts at step 0 with new optimizer moments."),
    json=output.json_flag("what was written"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    source_run.check_output(values.output)
    if values.experts is None:
        raise UserError(
            "--experts is missing: the number of experts per layer, such as --experts=8"
        )
    if values.experts < 2:
        raise UserError(f"--experts={values.experts}; 2 or more were expected")
    with source_run.opened(values, console) as run:
        run.check_decoder(Translator)
        params = _params(values, run.params)
        source = SourceRun.read(run)
        run.progress.begin("Adding experts")
        sparse = source.trainer_of(params)
        moments = None if values.restart else source.checkpoint.moments
        state = upcycling.upcycled_state(source.trainer, sparse, source.checkpoint.theta, moments)
        if values.exact:
            try:
                upcycling.check_same_function(
                    source.trainer.task, source.theta, sparse.task, state.theta
                )
            except UserError as error:
                raise UserError(f"{error}. --noexact converts it anyway") from None
        step = 0 if values.restart else source.checkpoint.step
        source.write(values.output, params, state, step)
    before, after = map(source_run.count_parameters, (source.trainer, sparse))
    head = f"{run.params.name}, step {source.checkpoint.step:,}"
    console.say(f"{head}: {before:,} parameters became {after:,}")
    more = f" --steps={2 * step}" if step >= params.run.steps else ""
    console.say(f"Continue with:\n  gshard-train --logdir={values.output}{more}")
    record = {"logdir": values.output, "step": step}
    record |= {"parameters_before": before, "parameters": after, "experts": values.experts}
    output.write_json(values.json, record)
    return 0


def _params(values: flags.FlagValues, dense: Params) -> Params:
    params = dense.copy()
    with explained(f"--logdir={values.logdir}", UserError):
        params.task = upcycling.upcycled_task(dense.task, values.experts, values.moe_every)
    return apply_gin(params, values.gin_file, values.gin_param)
