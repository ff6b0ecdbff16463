"""Scores of trainings, and the useful work of each."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
import rich.console

from benchmarks.decode.sizes import DenseSizes, dense_sizes
from lingvo_gshard.api.saved_run import SavedRun
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data import Row
from lingvo_gshard.tools.console.tables import print_rows
from lingvo_gshard.training.experiments import with_configured_vocabularies
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.inference.loading import facts_of
from lingvo_gshard.wings.services.metrics_rows import rows_of_run
from lingvo_gshard.wings.services.run_records import read_evaluations, read_launches

OURS = "lingvo_gshard"


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
      parameters: weights that are trained.
      steps: steps.
      seconds: time of the steps, without preparation and compilation.
      tokens: source and target tokens, without padding.
      flops: useful operations; see `training_flops`.
      chrf: mean of the languages' chrF on the test rows.
      bleu: mean of the languages' BLEU on the test rows.
    """

    parameters: int
    steps: int
    seconds: float
    tokens: int
    flops: float
    chrf: float
    bleu: float


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """The trainings of a library with one setting. Figures are means over its runs.

    Attributes:
      library: its name.
      setting: the name of the setting, or of our experiment.
      runs: the trainings, which differ by their seeds.
      parameters: weights that are trained.
      steps: steps.
      minutes: time of the steps.
      tokens_per_second: source and target tokens, without padding.
      gflops: useful work, in GFLOP/s; see `training_flops`.
      chrf: mean chrF.
      chrf_spread: largest chrF less the smallest.
      bleu: mean BLEU.
      bleu_spread: largest BLEU less the smallest.
    """

    library: str
    setting: str
    runs: list[Training]
    parameters: int
    steps: float
    minutes: float
    tokens_per_second: float
    gflops: float
    chrf: float
    chrf_spread: float
    bleu: float
    bleu_spread: float


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


def score(rows: Sequence[Row], translations: Sequence[str]) -> text_scores.Score:
    """Returns the scores of translations as gshard-evaluate averages them over languages."""
    languages, sources, targets = zip(
        *((row.language, row.source, row.target) for row in rows), strict=True
    )
    scores = text_scores.score_languages(
        languages, sources, targets, translations, with_shuffled=False
    )
    mean, _ = text_scores.average(scores)
    assert mean, "no language has enough rows"
    return mean.translated


def read_training(logdir: str, train_rows: Sequence[Row], test_rows: int) -> tuple[str, Training]:
    """Returns the name of a run's experiment and the training that its records describe.

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
    own = run.input.rows("train")
    if list(own) != list(train_rows):
        raise UserError(
            f"--logdir={logdir}: the run was trained on {len(own):,} rows, which are not the "
            f"{len(train_rows):,} rows of the quickstart"
        )
    # The first step, which is compiled, has no rate.
    timed = [row for row in rows_of_run(run.logdir.path) if row.get("tokens_per_second")]
    tokens = round(sum(row["tokens"] for row in timed))
    params, lengths = run.params, run.input.table("train")
    task = with_configured_vocabularies(params).instantiate()
    lengths = lengths.lengths_of(np.arange(len(lengths)))
    epoch = training_flops(dense_sizes(task, facts_of(task, params.input)), lengths)
    return params.name, Training(
        parameters=read_launches(run.logdir.place)[-1].parameters,
        steps=run.step,
        seconds=sum(row["tokens"] / row["tokens_per_second"] for row in timed),
        tokens=tokens,
        flops=epoch * tokens / int(lengths.sum()),
        chrf=scored[-1]["chrf"],
        bleu=scored[-1]["bleu"],
    )


def make_row(library: str, setting: str, runs: list[Training]) -> TrainingRow:
    """Returns the row of trainings that differ by their seeds."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    chrf, bleu = [run.chrf for run in runs], [run.bleu for run in runs]
    return TrainingRow(
        library=library,
        setting=setting,
        runs=runs,
        parameters=runs[0].parameters,
        steps=mean([run.steps for run in runs]),
        minutes=mean([run.seconds / 60 for run in runs]),
        tokens_per_second=mean([run.tokens / run.seconds for run in runs]),
        gflops=mean([run.flops / run.seconds / 1e9 for run in runs]),
        chrf=mean(chrf),
        chrf_spread=max(chrf) - min(chrf),
        bleu=mean(bleu),
        bleu_spread=max(bleu) - min(bleu),
    )


def print_table(console: rich.console.Console, rows: list[TrainingRow]) -> None:
    """Prints the rows."""
    caption = (
        "GFLOP/s: 6 x tokens x weights of the products they meet + 12 x width x visible pairs; "
        "chrF and BLEU: mean over languages; in parentheses: largest less smallest of several runs"
    )
    cells = [
        (
            row.library,
            row.setting,
            f"{row.parameters / 1e6:.1f}M",
            f"{row.minutes:.1f}",
            f"{row.steps:,.0f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.gflops:.0f}",
            _with_spread(row.chrf, row.chrf_spread, len(row.runs)),
            _with_spread(row.bleu, row.bleu_spread, len(row.runs)),
        )
        for row in rows
    ]
    numbers = ("parameters", "minutes", "steps", "tokens/s", "GFLOP/s", "chrF", "BLEU")
    print_rows(console, ("library", "setting"), numbers, cells, caption)


def _with_spread(mean: float, spread: float, runs: int) -> str:
    return f"{mean:.1f} ({spread:.1f})" if runs > 1 else f"{mean:.1f}"
