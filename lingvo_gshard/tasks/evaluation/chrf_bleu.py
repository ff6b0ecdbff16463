"""Scores of translations: BLEU and chrF by sacrebleu, by language and averaged over languages."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from sacrebleu.metrics import BLEU, CHRF

from lingvo_gshard.data.batching import mixing

# A language with fewer rows than this has a score, but no part in the average.
LEAST_ROWS = 20


@dataclasses.dataclass(frozen=True)
class Score:
    """chrF2 (Popović 2015, https://aclanthology.org/W15-3049) and BLEU of a corpus, 0 to 100."""

    chrf: float
    bleu: float


@dataclasses.dataclass(frozen=True)
class LanguageScores:
    """The scores of one language: the translations, those of other sources, the sources themselves.

    `shuffled` is what the same translations score against one another's references, so it is what
    a model scores that does not read its input. It is None where it was not asked for, or for want
    of a second row.
    """

    rows: int
    unique_references: int
    translated: Score
    copied: Score
    shuffled: Score | None = None


def signatures() -> dict[str, str]:
    """Returns sacrebleu's signatures of the scores, which say all that a score depends on."""
    found = {}
    for name, metric in (("chrf", CHRF()), ("bleu", BLEU())):
        metric.corpus_score(["a"], [["a"]])
        found[name] = str(metric.get_signature())
    return found


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Returns the corpus scores of hypotheses against one reference each."""
    references = [list(references)]
    return Score(
        CHRF().corpus_score(list(hypotheses), references).score,
        BLEU(force=True).corpus_score(list(hypotheses), references).score,
    )


def score_languages(
    languages: Sequence[str],
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[str],
    with_shuffled: bool = True,
) -> dict[str, LanguageScores]:
    """Returns the scores by language, in the order in which languages first occur."""
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
    """Returns the mean of the scores of languages with `least_rows` or more, and which these are.

    Every language counts the same. Rows and unique references are summed. None if there is none.
    """
    names = tuple(name for name, found in scores.items() if found.rows >= least_rows)
    if not names:
        return None, ()
    counted = [scores[name] for name in names]
    all_shuffled = all(found.shuffled for found in counted)
    mean = LanguageScores(
        rows=sum(found.rows for found in counted),
        unique_references=sum(found.unique_references for found in counted),
        translated=_mean(found.translated for found in counted),
        copied=_mean(found.copied for found in counted),
        shuffled=_mean(found.shuffled for found in counted) if all_shuffled else None,
    )
    return mean, names


def shuffled_partners(languages: Sequence[str]) -> list[int]:
    """Returns for each row the row of the same language whose source it is given instead.

    A fixed random order of each language's rows, each taking the next one's: never its own, unless
    its language has one row.
    """
    partners = list(range(len(languages)))
    for rows in _rows_by_language(languages).values():
        order = [rows[index] for index in mixing.permutation(len(rows), 0)]
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
