"""Measures the use of experts by language, on rows chosen by flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import rich.console
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.sources.readers import SPLITS
from lingvo_gshard.data.sources.row import Row, rows_by_language
from lingvo_gshard.tasks.evaluation.translation_scores import choose_rows
from lingvo_gshard.tools.console.progress import Progress
from lingvo_gshard.training.run.monitoring import expert_use
from lingvo_gshard.training.run.monitoring.expert_use import ExpertUse


def define_row_flags(values: flags.FlagValues, split: str) -> None:
    """Adds the flags that choose the rows; `split` is the default of --split."""
    flags.DEFINE_string(
        "split", split, "Part of the data to read: train, dev or test.", flag_values=values
    )
    flags.DEFINE_list(
        "languages", [], "Languages to read, such as es,de; default: all.", flag_values=values
    )
    flags.DEFINE_integer(
        "max_rows_per_language",
        200,
        "Most rows to read of each language, a fixed random choice.",
        1,
        flag_values=values,
    )


def choose_rows_by_flags(values: flags.FlagValues, run: Run) -> list[Row]:
    """Returns the rows that the flags choose; ValueError for an unknown split or language."""
    if values.split not in SPLITS:
        hint = names.nearest(values.split, SPLITS)
        raise UserError(f"--split={values.split} is unknown. {hint}")
    rows = _text_input(run).rows(values.split)
    return choose_rows(rows, values.split, values.languages, values.max_rows_per_language)


def use_by_language(
    run: Run, task: Layer, theta: NestedMap, rows: Sequence[Row], console: rich.console.Console
) -> dict[str, dict[str, ExpertUse]]:
    """Returns language -> path of a layer -> the use of its experts for the language's rows.

    The model reads the source and the target of each row in evaluation. Rows that are too long for
    a batch are left out.

    Args:
      run: the trained run.
      task: its task.
      theta: its weights.
      rows: rows of all languages.
      console: shows progress.

    Raises:
      UserError: the model has no experts.
    """
    found: dict[str, dict[str, ExpertUse]] = {}
    done = 0
    with Progress(console, "Experts", "rows", len(rows)) as progress:

        def count(batch: dict[str, np.ndarray]) -> None:
            nonlocal done
            done += int(batch["target_segments"].max(axis=1).sum())
            progress.update(done)

        for language, members in rows_by_language(rows).items():
            batches = _batches(run, members)
            found[language] = expert_use.measure(task, theta, batches, count)
        progress.update(len(rows))
    found = {language: use for language, use in found.items() if use}
    if not found:
        raise UserError(
            f"the run of {run.params.name} has no experts, or none of its rows fits a batch"
        )
    return found


def _text_input(run: Run) -> Any:
    """Returns the input, which has `rows` and `pack_rows` where a run translates."""
    return run.input


def _batches(run: Run, rows: Sequence[Row]) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of the rows that fit, packed as in training, without empty batch rows."""
    batches, _ = _text_input(run).pack_rows(rows)
    for batch in batches:
        filled = int(np.count_nonzero(batch["target_segments"].any(axis=1)))
        yield {name: values[:filled] for name, values in batch.items()}
