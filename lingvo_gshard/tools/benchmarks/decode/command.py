"""The subcommand `gshard-bench decode`."""

from __future__ import annotations

import os
import random

import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard import params as experiments  # noqa: F401
from lingvo_gshard.api import tables
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.cleaning.normalization import Normalizer
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.tools.benchmarks.decode import measure
from lingvo_gshard.tools.console.stages import transient_stages

# Positions of a text of the language model: room for the longest prompt and its continuation.
_POSITIONS = 256


def run(values: flags.FlagValues, console: rich.console.Console) -> list[measure.DecodingTiming]:
    """Runs the benchmark, prints its table and returns the rows."""
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with transient_stages(console, "reading the test sentences") as progress:
        models, found = make_cases(
            registry.get(values.experiment), registry.get(values.language_model), values.sentences
        )
        for row in measure.measure(models, found, None, threads, values.repeats, progress):
            show_row(console, row)
            rows.append(row)
    return rows


def show_row(console: rich.console.Console, row: measure.DecodingTiming) -> None:
    """Prints a row as soon as it is measured."""
    console.print(f"{row.case}, {row.engine}: {row.tokens_per_second:,.0f} tokens/s")


def make_cases(
    translation: Params, language_model: Params, sentences: int
) -> tuple[dict[str, measure.Model], list[measure.Case]]:
    """Returns the models by name, and what is decoded with them.

    Args:
      translation: the experiment whose test sentences are translated.
      language_model: the experiment of the language model.
      sentences: the number of test sentences.
    """
    model = measure.initial_model(translation)
    found = measure.translation_cases(
        test_sources(translation, sentences, model.facts.most_source - 1)
    )
    other = measure.initial_model(language_model, _POSITIONS)
    models = {measure.TRANSLATION: model, measure.LANGUAGE_MODEL: other}
    return models, found + measure.language_model_cases(other.facts)


def test_sources(experiment: Params, count: int, room: int) -> list[list[int]]:
    """Returns the ids of a fixed random choice of test sentences, without the ends.

    Args:
      experiment: Params whose input has the sentences and trains the vocabulary.
      count: how many; all if there are not as many.
      room: the largest number of ids of a sentence; longer ones are cut.
    """
    input_ = experiment.input.instantiate()
    if not isinstance(input_, TranslationInput):
        raise UserError(f"--experiment={experiment.name} is not for translation")
    rows, normal = input_.rows("test"), Normalizer()
    chosen = random.Random(0).sample(rows, min(count, len(rows)))
    encoded = input_.source_vocabulary.encode_batch([normal(row.source) for row in chosen])
    return [ids[:room] for ids in encoded if ids]


def print_table(console: rich.console.Console, rows: list[measure.DecodingTiming]) -> None:
    """Prints the rows of `gshard-bench decode`."""
    caption = (
        "ratio: our speed to this engine's, int8 to int8; limit: share of the rate of a float32 "
        "matrix product"
    )
    table = rich.table.Table(box=rich.box.SIMPLE, caption=caption)
    for heading in ("case", "engine"):
        table.add_column(heading)
    for heading in ("tokens/s", "ms", "ratio", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        is_ours = row.engine in measure.OURS
        table.add_row(
            row.case if row.engine == next(iter(measure.OURS)) else "",
            row.engine,
            f"{row.tokens_per_second:,.0f}",
            f"{row.seconds * 1e3:,.1f}",
            "" if is_ours else f"{row.ratio:.2f}",
            f"{row.limit_share:.1%}",
        )
    tables.print_table(console, table)
