"""Keeps those experts of a trained model that some languages use most (after arXiv 2212.09811).

    gshard-experts prune --logdir=runs/quickstart --languages=de,nl --keep=0.5 \\
        --output=runs/de_nl
    gshard-evaluate --logdir=runs/de_nl --languages=de,nl

The model reads dev rows of the languages with their translations; of each layer the experts are
kept that had most to do, in encoder and decoder the same share of them, though never fewer than a
token uses. What they are judged by is --by: load, the tokens that came to an expert, or gate, the
sum of the weights that its output had for them. Tokens then choose among the experts that are left:
a token whose experts all are computes what it did.

The new run is a run like any other: it is translated with and scored, in less memory, and
gshard-train --logdir=OUTPUT --steps=N goes on with it, for the experts that are left have kept
their optimizer moments.
"""

from __future__ import annotations

import rich.console
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config import names
from lingvo_gshard.decoding import Translator
from lingvo_gshard.tools.expert_tools import converted
from lingvo_gshard.tools.expert_tools.converted import Whole
from lingvo_gshard.tools.expert_tools.rows import define_row_flags, rows_asked_for, use_by_language
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.training.monitoring.expert_use import ExpertUse
from lingvo_gshard.training.surgery import pruning


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    converted.define_output_flag(values)
    define_row_flags(values, "dev")
    flags.DEFINE_float(
        "keep", 0.5, "Share of each layer's experts to keep, rounded.", flag_values=values
    )
    flags.DEFINE_string(
        "by", pruning.LOAD, "What experts are judged by: load or gate.", flag_values=values
    )
    return values


def run(values: flags.FlagValues, console: rich.console.Console) -> None:
    """Does what the flags ask for; ValueError for a user's mistake."""
    converted.check_output(values.output)
    if not 0 < values.keep <= 1:
        raise ValueError(f"--keep={values.keep:g}; more than 0 and at most 1 was expected")
    if values.by not in pruning.CRITERIA:
        raise ValueError(f"--by={values.by}: {names.nearest(values.by, pruning.CRITERIA)}")
    run_ = Run(required_logdir(values))
    run_.check_decoder(Translator)
    params = run_.params.copy()
    try:
        params.task = pruning.pruned_task(params.task, values.keep)
    except ValueError as error:
        raise ValueError(f"--logdir={values.logdir}: {error}") from None
    rows = rows_asked_for(values, run_)
    whole = Whole.read(run_)
    pruned = whole.trainer_of(params)
    by_language = use_by_language(run_, whole.trainer.task, whole.theta, rows, console)
    use = _of_all(by_language)
    kept = pruning.chosen(params.task, use, values.by)
    checkpoint = whole.checkpoint
    state = pruning.pruned_state(whole.trainer, pruned, checkpoint.theta, checkpoint.moments, kept)
    whole.write(values.output, params, state, checkpoint.step)
    for layer, experts in kept.items():
        share = use[layer].shares[experts].sum()
        console.print(
            f"{layer}: {len(experts)} of {len(use[layer].load)} experts, to which {share:.1%} of "
            f"tokens came: {', '.join(map(str, experts))}",
            markup=False,
            soft_wrap=True,
        )
    before, after = map(converted.parameters, (whole.trainer, pruned))
    console.print(
        f"{before:,} parameters became {after:,}; the run is in {values.output}",
        markup=False,
        soft_wrap=True,
    )


def _of_all(use: dict[str, dict[str, ExpertUse]]) -> dict[str, ExpertUse]:
    """The use by layer over all languages, each of which counts by its tokens."""
    first, *rest = use.values()
    return {layer: sum((found[layer] for found in rest), first[layer]) for layer in first}
