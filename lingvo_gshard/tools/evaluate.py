"""Scores a trained model on a split of its data."""

from __future__ import annotations

import contextlib
from typing import Any

from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.api.options import TaskOptions
from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError, declared, names
from lingvo_gshard.tasks import Evaluation, Task
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags import run as run_flags
from lingvo_gshard.tools.flags.definitions import (
    Flags,
    comma_list,
    integer,
    maker,
    refuse,
    string,
    switch,
)
from lingvo_gshard.tools.flags.options import given_options, option_flags, read_options
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.services.progress import StageDisplay

# Flags of an evaluation on tasks of lm-evaluation-harness.
_HARNESS_FLAGS = tuple(declared(TaskOptions))
# `best` is no flag here, since one text of each row is scored.
_SEARCH_FLAGS = tuple(name for name in declared(DecodingOptions) if name != "best")

_NOTES = {"seed": "Here it is 0 by default, so that scores repeat."}
# Flags that are options of some tasks' evaluation.
_TASK_FLAGS: Flags = dict(
    languages=comma_list(
        "Source languages to score, such as es,de; by default all. For translation.", []
    ),
    max_rows_per_language=integer(
        "Scores a fixed random choice of at most this many rows per language. For translation.",
        least=1,
    ),
    shuffled=switch("Also scores shuffled sources; --noshuffled does not. For translation.", True),
    by_source=switch(
        "Also scores the texts of each source of the prepared data. For language models."
    ),
)
define_flags = maker(
    logdir=run_flags.LOGDIR,
    checkpoint=run_flags.CHECKPOINT,
    split=string("Split to score: train, dev or test.", "test"),
    **_TASK_FLAGS,
    tasks=comma_list(
        "Tasks or groups of lm-evaluation-harness, such as arc_easy,hellaswag; in place of a "
        "split. For language models.",
        [],
    ),
    **option_flags(TaskOptions(tasks=())),
    json=output.json_flag("all scores"),
    output="File to write to, tab-separated: language, source, reference, translation. For "
    "translation.",
    **option_flags(DecodingOptions(), _SEARCH_FLAGS, _NOTES),
    precision=run_flags.precision_flag(),
    **run_flags.runtime_flags(),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    logdir = run_flags.required_logdir(values)
    console = output.make_console(values.json, values.output)
    with contextlib.ExitStack() as stack:
        stages = stack.enter_context(StageDisplay(console))
        stages.begin("Starting")
        run = Run(logdir, run_flags.runtime_options(values), values.precision, values.checkpoint)
        run.progress = stages
        evaluate = _evaluate_on_tasks if values.tasks else _evaluate_split
        evaluation, facts = evaluate(values, run, console, stack)
        stages.close()
        where = f" of {values.split}" if facts else ""
        console.say(f"{run.params.name}, step {run.step:,}: {evaluation.size}{where}")
        tables.print_table(console, tables.rich_table(evaluation.table()))
        for line in evaluation.notes():
            console.say(line)
        if run.backend.is_main:
            record = {"logdir": values.logdir, "experiment": run.params.name, "step": run.step}
            output.write_json(values.json, record | facts | evaluation.to_record())
            lines = ("\t".join(cells) + "\n" for cells in evaluation.output_rows())
            output.write_text(values.output, "".join(lines), "output")
    return 0


def _evaluate_split(
    values: flags.FlagValues, run: Run, console: output.Console, stack: contextlib.ExitStack
) -> tuple[Evaluation, dict[str, Any]]:
    """Returns the scores of a run on a split, and further facts of the record."""
    refuse(values, _HARNESS_FLAGS, "needs --tasks")
    options = _options(values, run.params.task.cls, run.params.name)
    names.check(values.split, run.input.splits, f"--split={values.split} is unknown")
    stack.enter_context(run)
    console.quiet = not run.backend.is_main
    if run.backend.is_main:
        output.check_writable(values, "json", "output")
    run.input.check_split(values.split)
    evaluation = run.evaluate(values.split, **options)
    return evaluation, {"split": values.split, "precision": run.precision}


def _evaluate_on_tasks(
    values: flags.FlagValues, run: Run, console: output.Console, stack: contextlib.ExitStack
) -> tuple[Evaluation, dict[str, Any]]:
    from lingvo_gshard.api.tasks import evaluate_on_tasks

    refuse(values, ("split", "output", *_TASK_FLAGS, *_SEARCH_FLAGS), "has no effect on --tasks")
    task = run.params.task.cls
    if task.DECODING is None or task.DECODING.has_source:
        raise UserError(f"--tasks are for language models, and not for {run.params.name}")
    output.check_writable(values, "json")
    stack.enter_context(run)
    console.quiet = not run.backend.is_main
    return evaluate_on_tasks(run, read_options(values, TaskOptions, tasks=values.tasks)), {}


def _options(values: flags.FlagValues, task: type[Task], experiment: str) -> dict[str, Any]:
    """Returns the task's options that have a flag. Raises UserError for flags of other tasks."""
    unused = [flag for flag in _TASK_FLAGS if flag not in task.EVALUATION_OPTIONS]
    decodes = task.DECODING is not None and task.DECODING.is_evaluated
    unused += [] if decodes else [*_SEARCH_FLAGS, "precision"]
    unused += [] if task.HAS_OUTPUT_ROWS else ["output"]
    refuse(values, unused, f"does not apply to {task.__name__}, the task of {experiment}")
    used = {flag: values[flag].value for flag in _TASK_FLAGS if flag not in unused}
    if decodes:
        searched = given_options(values, DecodingOptions, _SEARCH_FLAGS)
        DecodingOptions(**searched)
        used |= searched
    return used
