"""Makes a smaller model of the experts that some languages use most (after arXiv 2212.09811)."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core import UserError, explained, names
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.experts import source_run
from lingvo_gshard.tools.experts.report import choose_rows_by_flags, row_flags, use_by_language
from lingvo_gshard.tools.experts.source_run import SourceRun
from lingvo_gshard.tools.flags.definitions import decimal, maker, string
from lingvo_gshard.tools.flags.run import LOGDIR
from lingvo_gshard.wings.fine_tuning.surgery import pruning
from lingvo_gshard.wings.inference.translator import Translator

define_flags = maker(
    logdir=LOGDIR,
    output=source_run.OUTPUT,
    **row_flags("dev"),
    keep=decimal("Share of each layer's experts to keep, rounded.", 0.5),
    by=string("Criterion for the experts to keep: load or gate.", pruning.LOAD),
    json=output.json_flag("what was written"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    source_run.check_output(values.output)
    if not 0 < values.keep <= 1:
        raise UserError(f"--keep={values.keep:g}; more than 0 and at most 1 was expected")
    names.check(values.by, pruning.CRITERIA, f"--by={values.by} is unknown")
    with source_run.opened(values, console) as run:
        run.check_decoder(Translator)
        params = run.params.copy()
        with explained(f"--logdir={values.logdir}", UserError):
            params.task = pruning.pruned_task(params.task, values.keep)
        rows = choose_rows_by_flags(values, run)
        source = SourceRun.read(run)
        pruned = source.trainer_of(params)
        by_language = use_by_language(run, source.trainer.task, source.theta, rows)
    # Each language counts by its tokens.
    first, *rest = by_language.values()
    use = {layer: sum((found[layer] for found in rest), first[layer]) for layer in first}
    kept = pruning.chosen(params.task, use, values.by)
    checkpoint = source.checkpoint
    state = pruning.pruned_state(source.trainer, pruned, checkpoint.theta, checkpoint.moments, kept)
    source.write(values.output, params, state, checkpoint.step)
    for layer, experts in kept.items():
        share = use[layer].shares[experts].sum()
        console.say(
            f"{layer}: {len(experts)} of {len(use[layer].load)} experts, which had {share:.1%} "
            f"of the tokens: {', '.join(map(str, experts))}"
        )
    before, after = map(source_run.count_parameters, (source.trainer, pruned))
    console.say(f"{before:,} parameters became {after:,}; the run is in {values.output}")
    record = {"logdir": values.output, "step": checkpoint.step}
    record |= {"parameters_before": before, "parameters": after}
    record["experts"] = {layer: [int(expert) for expert in found] for layer, found in kept.items()}
    output.write_json(values.json, record)
    return 0
