"""Trainings: their useful work, their scores, and the records of ours."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.decode.sizes import DenseSizes, dense_sizes
from lingvo_gshard.api.saved_run import SavedRun
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data import Row, TranslationInput
from lingvo_gshard.tools.console import Console
from lingvo_gshard.training.experiments import with_configured_vocabularies
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.inference.loading import facts_of
from lingvo_gshard.wings.services.metrics_rows import rows_of_run
from lingvo_gshard.wings.services.run_records import read_evaluations, read_launches


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
      library: the library's name.
      setting: name of the setting, or of our experiment.
      run: the seed, or the directory of our run.
      parameters: weights that are trained.
      steps: steps.
      seconds: time of the steps, without preparation and compilation.
      tokens_per_second: source and target tokens, without padding.
      gflops: useful work in GFLOP/s; see `training_flops`.
      chrf: mean chrF of the languages on the test rows.
      bleu: mean BLEU of the languages on the test rows.
    """

    library: str
    setting: str
    run: str
    parameters: int
    steps: int
    seconds: float
    tokens_per_second: float
    gflops: float
    chrf: float
    bleu: float


def training_flops(sizes: DenseSizes, lengths: np.ndarray) -> float:
    """Returns the useful operations of training on each sentence pair once.

    They are 6 for each token and each weight of a matrix product that the token meets, the softmax
    included, and 12 x model_dim for each pair of a query and a key that it may see. The backward
    pass counts as two forward passes; padding, norms and the optimizer count as nothing.

    Args:
      sizes: the model's sizes.
      lengths: [N,2], source and target tokens of each pair, with the ends of texts.
    """
    width, (sources, targets) = sizes.model_dim, lengths.T.astype(np.float64)
    encoder = sizes.encoder_layers * width * (4 * width + 2 * sizes.encoder_hidden)
    # Keys and values of cross-attention are products of the source's tokens.
    memory = sizes.decoder_layers * width * 2 * width
    decoder = sizes.decoder_layers * width * (6 * width + 2 * sizes.decoder_hidden)
    softmax = width * sizes.vocabulary_size
    products = (encoder + memory) * sources.sum() + (decoder + softmax) * targets.sum()
    visible = sizes.encoder_layers * (sources**2).sum()
    visible += sizes.decoder_layers * (targets * (targets + 1) / 2 + targets * sources).sum()
    return float(6 * products + 12 * width * visible)


def gflops(sizes: DenseSizes, lengths: np.ndarray, tokens_per_second: float) -> float:
    """Returns the useful work in GFLOP/s of training at a rate; for the rest `training_flops`."""
    return training_flops(sizes, lengths) / int(lengths.sum()) * tokens_per_second / 1e9


def score(rows: Sequence[Row], translations: Sequence[str]) -> text_scores.Score:
    """Returns the scores of translations as gshard-evaluate averages them over languages."""
    scores = text_scores.score_languages(
        [row.language for row in rows],
        [row.source for row in rows],
        [row.target for row in rows],
        translations,
        with_shuffled=False,
    )
    mean, _ = text_scores.average(scores)
    assert mean, "no language has enough rows"
    return mean.translated


def read_training(logdir: str, train_rows: Sequence[Row], test_rows: int) -> Training:
    """Returns the training that the records of a run describe.

    Args:
      logdir: directory of the run.
      train_rows: the rows that the run must have been trained on.
      test_rows: the number of test rows that must have been scored.

    Raises:
      UserError: there is no trained run, it was trained on other rows, or the scores of all test
        rows are missing.
    """
    run = SavedRun(logdir)
    scored = [
        row.scores["average"]["translated"]
        for row in read_evaluations(run.logdir.place)
        if row.split == "test" and row.scores.get("rows") == test_rows
    ]
    if not scored:
        raise UserError(
            f"--logdir={logdir}: the scores of all {test_rows:,} test rows of the quickstart are "
            f"missing: gshard-evaluate --logdir={logdir} makes them"
        )
    input_ = run.input
    is_quickstart = isinstance(input_, TranslationInput)
    if not is_quickstart or list(input_.rows("train")) != list(train_rows):
        raise UserError(
            f"--logdir={logdir}: the run was not trained on the {len(train_rows):,} rows of the "
            "quickstart"
        )
    # The first step, which is compiled, has no rate.
    timed = [row for row in rows_of_run(run.logdir.path) if row.get("tokens_per_second")]
    seconds = sum(row["tokens"] / row["tokens_per_second"] for row in timed)
    rate = sum(row["tokens"] for row in timed) / seconds
    task, table = with_configured_vocabularies(run.params).instantiate(), input_.table("train")
    sizes = dense_sizes(task, facts_of(task, run.params.input))
    return Training(
        library="lingvo_gshard",
        setting=run.params.name,
        run=logdir,
        parameters=read_launches(run.logdir.place)[-1].parameters,
        steps=run.step,
        seconds=seconds,
        tokens_per_second=rate,
        gflops=gflops(sizes, table.lengths_of(np.arange(len(table))), rate),
        chrf=scored[-1]["chrf"],
        bleu=scored[-1]["bleu"],
    )


def print_table(console: Console, trainings: Sequence[Training]) -> None:
    """Prints a row for each library and setting: the means of its runs, which are adjacent."""
    caption = (
        "GFLOP/s: 6 x tokens x weights of the products they meet + 12 x width x visible pairs; "
        "chrF and BLEU: means over languages; in parentheses: largest less smallest of the runs"
    )
    cells = []
    for names, group in itertools.groupby(trainings, lambda each: (each.library, each.setting)):
        runs = list(group)
        means = [
            (f"{runs[0].parameters / 1e6:.1f}M"),
            f"{statistics.fmean(run.seconds / 60 for run in runs):.1f}",
            f"{statistics.fmean(run.steps for run in runs):,.0f}",
            f"{statistics.fmean(run.tokens_per_second for run in runs):,.0f}",
            f"{statistics.fmean(run.gflops for run in runs):.0f}",
        ]
        scores = [[run.chrf for run in runs], [run.bleu for run in runs]]
        cells.append((*names, *means, *map(_with_spread, scores)))
    numbers = ("parameters", "minutes", "steps", "tokens/s", "GFLOP/s", "chrF", "BLEU")
    console.print_rows(("library", "setting"), numbers, cells, caption)


def _with_spread(scores: Sequence[float]) -> str:
    spread = f" ({max(scores) - min(scores):.1f})" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{spread}"
