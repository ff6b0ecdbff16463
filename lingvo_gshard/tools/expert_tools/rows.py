"""The rows that experts are looked at with, and what they do with those of each language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import rich.console
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config import names
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.sources.readers import SPLITS
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.tasks.evaluation.translation_scores import choose_rows
from lingvo_gshard.tools.console.progress import Progress
from lingvo_gshard.training.monitoring import expert_use
from lingvo_gshard.training.monitoring.expert_use import ExpertUse


def define_row_flags(values: flags.FlagValues, split: str) -> None:
    """Adds the flags that say which rows are looked at; `split` is the default of --split."""
    flags.DEFINE_string("split", split, "train, dev or test.", flag_values=values)
    flags.DEFINE_list(
        "languages", [], "Languages, as es,de; all there are if not given.", flag_values=values
    )
    flags.DEFINE_integer(
        "max_rows_per_language",
        200,
        "Looks at a fixed random choice of so many rows of each.",
        1,
        flag_values=values,
    )


def rows_asked_for(values: flags.FlagValues, run: Run) -> list[Row]:
    """Returns the rows that the flags name; ValueError with the nearest name if there are none."""
    if values.split not in SPLITS:
        hint = names.nearest(values.split, SPLITS)
        raise ValueError(f"--split={values.split} is unknown. {hint}")
    rows = run.input.rows(values.split)
    return choose_rows(rows, values.split, values.languages, values.max_rows_per_language)


def use_by_language(
    run: Run, task: Layer, theta: NestedMap, rows: Sequence[Row], console: rich.console.Console
) -> dict[str, dict[str, ExpertUse]]:
    """Returns language -> path of a layer -> what its experts did with the language's rows.

    The model reads each row's source and target, as in training, without training. Rows too long
    for that are left out. Raises ValueError if the model has no experts.
    """
    found: dict[str, dict[str, ExpertUse]] = {}
    done = 0
    with Progress(console, "Experts", "rows", len(rows)) as progress:

        def count(batch: dict[str, np.ndarray]) -> None:
            nonlocal done
            done += int(batch["target_segments"].max(axis=1).sum())
            progress.update(done)

        for language in dict.fromkeys(row.language for row in rows):
            members = [row for row in rows if row.language == language]
            batches = _batches(run, members)
            found[language] = expert_use.measure(task, theta, batches, count)
        progress.update(len(rows))
    found = {language: use for language, use in found.items() if use}
    if not found:
        raise ValueError(
            f"the run of {run.params.name} has no experts, or none of its rows fits a batch"
        )
    return found


def _batches(run: Run, rows: Sequence[Row]) -> Iterator[dict[str, np.ndarray]]:
    """The rows that fit, packed as in training, without the rows of a batch that stay empty."""
    batches, _ = run.input.pack_rows(rows)
    for batch in batches:
        filled = int(np.count_nonzero(batch["target_segments"].any(axis=1)))
        yield {name: values[:filled] for name, values in batch.items()}
