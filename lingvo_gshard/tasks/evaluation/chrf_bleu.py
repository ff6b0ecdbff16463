"""BLEU and chrF of translations by sacrebleu, by language and averaged over languages."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from lingvo_gshard.core.lazy import bleu, chrf
from lingvo_gshard.data.batching.permutations import permutation

# Languages with fewer rows are scored, but left out of the average.
LEAST_ROWS = 20


@dataclasses.dataclass(frozen=True)
class Score:
    """Scores of a corpus, from 0 to 100.

    Attributes:
      chrf: chrF2 (Popović 2015, https://aclanthology.org/W15-3049).
      bleu: BLEU (Papineni et al. 2002, https://aclanthology.org/P02-1040).
    """

    chrf: float
    bleu: float


@dataclasses.dataclass(frozen=True)
class LanguageScores:
    """Scores of one source language, with two baselines.

    Attributes:
      rows: number of rows.
      unique_references: number of distinct references.
      translated: scores of the translations.
      copied: scores of the sources, taken as translations.
      shuffled: scores of the same translations, each against the reference of another row: what a
        model scores that does not read its input. None if not wanted, or if there is one row.
    """

    rows: int
    unique_references: int
    translated: Score
    copied: Score
    shuffled: Score | None = None


def signatures() -> dict[str, str]:
    """Returns sacrebleu's signatures, which record all settings of the metrics, by name."""
    found = {}
    for name, metric in (("chrf", chrf.CHRF()), ("bleu", bleu.BLEU())):
        metric.corpus_score(["a"], [["a"]])
        found[name] = str(metric.get_signature())
    return found


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Returns the corpus scores of hypotheses against one reference each."""
    streams = [list(references)]
    return Score(
        chrf.CHRF().corpus_score(list(hypotheses), streams).score,
        bleu.BLEU(force=True).corpus_score(list(hypotheses), streams).score,
    )


def score_languages(
    languages: Sequence[str],
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[str],
    with_shuffled: bool = True,
) -> dict[str, LanguageScores]:
    """Returns the scores of each language, in the order in which languages first occur.

    Args:
      languages: source language of each row.
      sources: source of each row.
      references: reference of each row.
      translations: translation of each row.
      with_shuffled: whether to score shuffled sources.
    """
    partners = shuffled_partners(languages)
    scores = {}
    for language, rows in _rows_by_language(languages).items():
        wanted = [references[row] for row in rows]
        shuffled = None
        if with_shuffled and len(rows) > 1:
            shuffled = score([translations[partners[row]] for row in rows], wanted)
        scores[language] = LanguageScores(
            rows=len(rows),
            unique_references=len(set(wanted)),
            translated=score([translations[row] for row in rows], wanted),
            copied=score([sources[row] for row in rows], wanted),
            shuffled=shuffled,
        )
    return scores


def average(
    scores: dict[str, LanguageScores], least_rows: int = LEAST_ROWS
) -> tuple[LanguageScores | None, tuple[str, ...]]:
    """Averages scores over languages, each counting the same.

    Args:
      scores: language -> scores.
      least_rows: languages with fewer rows are left out.

    Returns:
      The mean scores, with sums of rows and unique references, or None if no language has enough
      rows; and the languages averaged.
    """
    names = tuple(name for name, found in scores.items() if found.rows >= least_rows)
    if not names:
        return None, ()
    counted = [scores[name] for name in names]
    shuffled = [found.shuffled for found in counted if found.shuffled is not None]
    mean = LanguageScores(
        rows=sum(found.rows for found in counted),
        unique_references=sum(found.unique_references for found in counted),
        translated=_mean(found.translated for found in counted),
        copied=_mean(found.copied for found in counted),
        shuffled=_mean(shuffled) if len(shuffled) == len(counted) else None,
    )
    return mean, names


def shuffled_partners(languages: Sequence[str]) -> list[int]:
    """Returns for each row another row of the same language, in a fixed random order.

    Each row takes the next one of the order. It is its own partner only if its language has one
    row.
    """
    partners = list(range(len(languages)))
    for rows in _rows_by_language(languages).values():
        order = [rows[index] for index in permutation(len(rows), 0)]
        for row, partner in zip(order, order[1:] + order[:1], strict=True):
            partners[row] = partner
    return partners


def _rows_by_language(languages: Sequence[str]) -> dict[str, list[int]]:
    rows = collections.defaultdict(list)
    for row, language in enumerate(languages):
        rows[language].append(row)
    return dict(rows)


def _mean(scores: Iterable[Score]) -> Score:
    scores = list(scores)
    return Score(
        sum(found.chrf for found in scores) / len(scores),
        sum(found.bleu for found in scores) / len(scores),
    )
