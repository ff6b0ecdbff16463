"""Makes a dense model one with experts (sparse upcycling, arXiv 2212.05055).

    gshard-experts upcycle --logdir=runs/quickstart_dense --output=runs/upcycled --experts=8
    gshard-train --logdir=runs/upcycled --steps=6400

Each expert begins as a copy of the dense feed-forward layer in whose place it stands, the router is
new, and all else is the dense model's, its optimizer moments included. Before training the new
model computes what the dense one does: gates that sum to 1 weigh outputs that are alike. Options
under which it would not, such as an evaluation capacity that drops tokens, are refused; --noexact
has them all the same.

Experts come to every --moe_every-th layer of encoder and decoder, or of those stacks that have none
yet; router, groups and capacity are set as in gshard-train:

    gshard-experts upcycle --logdir=runs/quickstart_dense --output=runs/upcycled --experts=16 \\
        --gin_param="task.encoder.moe.group_size = 192" \\
        --gin_param="task.encoder.moe.router.capacity_factor = 1.5"

The new run goes on at the dense run's step, with its learning rate there, so give gshard-train more
--steps; --restart begins at step 0, with new optimizer moments and the schedule's warm-up.
"""

from __future__ import annotations

import rich.console
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config import gin_binding
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import Translator
from lingvo_gshard.tools.expert_tools import converted
from lingvo_gshard.tools.expert_tools.converted import Whole
from lingvo_gshard.tools.flags.run import required_logdir
from lingvo_gshard.training.surgery import upcycling
from lingvo_gshard.training.trainer import Trainer


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    flags.DEFINE_string("logdir", None, "Directory of the dense run.", flag_values=values)
    converted.define_output_flag(values)
    flags.DEFINE_integer("experts", None, "Experts of each layer, 2 or more.", flag_values=values)
    flags.DEFINE_integer(
        "moe_every",
        0,
        "Every so-manieth layer gets experts; 0: those that had a feed-forward layer of their own "
        "in the dense run, else every second.",
        0,
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "gin_file", [], "A gin file over the new run's Params.", flag_values=values
    )
    flags.DEFINE_multi_string(
        "gin_param", [], "One setting, as 'task.encoder.moe.group_size = 192'.", flag_values=values
    )
    flags.DEFINE_boolean(
        "exact",
        True,
        "Refuses what would compute other outputs than the dense model; --noexact does not.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "restart", False, "Begins at step 0 with new optimizer moments.", flag_values=values
    )
    return values


def run(values: flags.FlagValues, console: rich.console.Console) -> None:
    """Does what the flags ask for; ValueError for a user's mistake."""
    converted.check_output(values.output)
    if values.experts is None:
        raise ValueError("--experts is missing: how many each layer gets, such as --experts=8")
    if values.experts < 2:
        raise ValueError(f"--experts={values.experts}; 2 or more were expected")
    run_ = Run(required_logdir(values))
    run_.check_decoder(Translator)
    params = _params(values, run_.params)
    whole = Whole.read(run_)
    sparse = whole.trainer_of(params)
    moments = None if values.restart else whole.checkpoint.moments
    state = upcycling.upcycled_state(whole.trainer, sparse, whole.checkpoint.theta, moments)
    if values.exact:
        _check(whole, sparse, state)
    step = 0 if values.restart else whole.checkpoint.step
    whole.write(values.output, params, state, step)
    before, after = map(converted.parameters, (whole.trainer, sparse))
    head = f"{run_.params.name}, step {whole.checkpoint.step:,}"
    console.print(f"{head}: {before:,} parameters became {after:,}", markup=False)
    more = f" --steps={2 * step}" if step >= params.trainer.steps else ""
    console.print(
        f"Go on with:\n  gshard-train --logdir={values.output}{more}", markup=False, soft_wrap=True
    )


def _params(values: flags.FlagValues, dense: Params) -> Params:
    params = dense.copy()
    try:
        params.task = upcycling.upcycled_task(dense.task, values.experts, values.moe_every)
    except ValueError as error:
        raise ValueError(f"--logdir={values.logdir}: {error}") from None
    return gin_binding.apply_gin(params, values.gin_file, values.gin_param)


def _check(whole: Whole, sparse: Trainer, state: NestedMap) -> None:
    try:
        upcycling.check_same_function(whole.trainer.task, whole.theta, sparse.task, state.theta)
    except ValueError as error:
        raise ValueError(f"{error}. --noexact makes it nevertheless") from None
