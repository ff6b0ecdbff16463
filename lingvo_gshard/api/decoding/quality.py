"""Quality: what a precision of decoding costs in translation scores, and what it gains."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.core import Progress
from lingvo_gshard.data import Row, permutation
from lingvo_gshard.tasks import Table
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.translator import Translator

# Speed is measured in this many turns, after one turn that compiles.
_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality and speed of decoding with one precision.

    Attributes:
      precision: one of wings/inference/decoding/precision.py.
      mebibytes: the size of the decoding weights.
      rows: number of rows translated.
      chrf: chrF of all rows together.
      bleu: BLEU of all rows together.
      tokens_per_second: tokens of the translations by the median time of some turns.
      equal: share of the translations that equal the translation with the weights as trained.
    """

    precision: str
    mebibytes: float
    rows: int
    chrf: float
    bleu: float
    tokens_per_second: float
    equal: float


def compare_precisions(
    run: LoadedRun,
    precisions: Sequence[str],
    split: str = "dev",
    limit: int = 500,
    options: DecodingOptions | None = None,
) -> list[Quality]:
    """Translates rows of a split with each precision; see `Run.compare_precisions`."""
    run.check_decoder(Translator)
    runs = [_with_precision(run, precision) for precision in precisions]
    translators = [each.translator(options) for each in runs]
    rows = _rows(run, split, limit)
    sources = [row.source for row in rows]
    found = {}
    for precision, translator in zip(precisions, translators, strict=True):
        run.progress.begin(f"Translating, {precision}", "rows", len(rows))
        found[precision] = translator.translate(sources, run.progress)
    seconds = _seconds(translators, sources, run.progress)
    qualities, first = [], found[precisions[0]].texts
    for precision, translator, taken in zip(precisions, translators, seconds, strict=True):
        best = found[precision].best
        tokens = sum(len(hypotheses[0].log_probabilities) for hypotheses in best if hypotheses)
        score = text_scores.score(found[precision].texts, [row.target for row in rows])
        qualities.append(
            Quality(
                precision=precision,
                mebibytes=sum(w.nbytes for w in translator.engine.weights) / 2**20,
                rows=len(rows),
                chrf=score.chrf,
                bleu=score.bleu,
                tokens_per_second=tokens / taken,
                equal=sum(map(str.__eq__, found[precision].texts, first)) / len(rows),
            )
        )
    return qualities


def table_of(qualities: Sequence[Quality]) -> Table:
    """Returns a row for each precision. Scores show the difference from the first precision."""
    columns = ("precision", "MiB", "chrF", "BLEU", "equal", "tokens/s")
    rows, first = [], qualities[0]
    for found in qualities:
        scores = (f"{found.chrf:.2f}", f"{found.bleu:.2f}")
        if found is not first:
            lost = (found.chrf - first.chrf, found.bleu - first.bleu)
            scores = tuple(f"{s} ({d:+.2f})" for s, d in zip(scores, lost, strict=True))
        rows.append(
            (
                found.precision,
                f"{found.mebibytes:,.1f}",
                *scores,
                f"{found.equal:.1%}",
                f"{found.tokens_per_second:,.0f}",
            )
        )
    return Table(columns, rows)


def _with_precision(run: LoadedRun, precision: str) -> LoadedRun:
    if precision == run.precision:
        return run
    other = type(run)(run.logdir.place, run.options, precision, run.checkpoint)
    other.progress = run.progress
    return other


def _seconds(
    translators: Sequence[Translator], sources: Sequence[str], progress: Progress
) -> list[float]:
    """Returns the median time that each translator takes, in alternating turns."""
    turns = []
    progress.begin("Measuring speed", "turns", _TURNS)
    for turn in range(_TURNS):
        times = []
        for translator in translators:
            started = time.monotonic()
            translator.translate(sources)
            times.append(time.monotonic() - started)
        turns.append(times)
        progress.update(turn + 1)
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _rows(run: LoadedRun, split: str, limit: int) -> list[Row]:
    """Returns a fixed random choice of at most `limit` rows of a split."""
    input_: Any = run.input
    input_.check_split(split)
    rows = input_.rows(split)
    return [rows[index] for index in permutation(len(rows), 0)[:limit]]
