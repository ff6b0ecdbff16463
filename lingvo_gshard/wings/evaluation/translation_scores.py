"""Scores of a translation model: chrF and BLEU by language, and the likelihood of references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core import SILENT, Progress, UserError, names
from lingvo_gshard.data import Row, TranslationInput, permutation, rows_by_language
from lingvo_gshard.tasks import EVALUATIONS, Evaluation, EvaluationRuntime, Table
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.evaluation.likelihood import Likelihood, combined, measure_by_language
from lingvo_gshard.wings.evaluation.text_scores import LanguageScores

_SAMPLES = 5


class Translations(Protocol):
    """Translations of some sentences.

    Attributes:
      cut: indices of the sentences that were too long and lost their end.
    """

    @property
    def texts(self) -> Sequence[str]: ...

    @property
    def cut(self) -> Sequence[int]: ...


# Translates sentences, and tells how many are done.
Translate = Callable[[Sequence[str], Progress], Translations]


@dataclasses.dataclass(frozen=True)
class TranslationScores(Evaluation):
    """Scores of the translations of some rows.

    Attributes:
      translations: the model's translation of each row's source.
      sources_cut: number of sources that were too long and lost their end.
      languages: source language -> its scores.
      likelihoods: source language -> how well the model predicts its references.
    """

    rows: Sequence[Row]
    translations: Sequence[str]
    sources_cut: int
    languages: dict[str, LanguageScores]
    likelihoods: dict[str, Likelihood]

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the references of all languages."""
        return combined(self.likelihoods.values())

    @property
    def size(self) -> str:
        return f"{len(self.rows):,} rows"

    def to_record(self) -> dict[str, Any]:
        """Returns all scores by name, without the translations."""
        mean, averaged = text_scores.average(self.languages)
        return {
            "rows": len(self.rows),
            "sources_cut": self.sources_cut,
            **_likelihood(self.likelihood),
            "average": mean and dataclasses.asdict(mean),
            "averaged_languages": averaged,
            "languages": {
                name: dataclasses.asdict(scores) | _likelihood(self.likelihoods[name])
                for name, scores in self.languages.items()
            },
            "signatures": text_scores.signatures(),
        }

    def table(self) -> Table:
        """Returns a row for each language, and their average."""
        with_shuffled = any(scores.shuffled for scores in self.languages.values())
        shuffled = ("shuffled\nchrF", "shuffled\nBLEU") if with_shuffled else ()
        copied = ("copied\nchrF", "copied\nBLEU")
        columns = ("language", "rows", "chrF", "BLEU", *shuffled, *copied, "perplexity")
        rows = []
        for name, scores in self.languages.items():
            found = self.likelihoods[name]
            perplexity = f"{found.perplexity:.1f}" if found.tokens else "-"
            rows.append((name, *_cells(scores, with_shuffled), perplexity))
        mean, _ = text_scores.average(self.languages)
        return Table(columns, rows, mean and ("average", *_cells(mean, with_shuffled), ""))

    def notes(self) -> list[str]:
        """Returns what the average covers, the likelihood, the metrics' versions and samples."""
        return [*self._average_notes(), *self._likelihood_notes(), *self._sample_notes()]

    def output_rows(self) -> Iterator[Sequence[str]]:
        """Yields language, source, reference and translation of each row."""
        for row, translation in zip(self.rows, self.translations, strict=True):
            yield row.language, row.source, row.target, translation

    def _average_notes(self) -> list[str]:
        mean, averaged = text_scores.average(self.languages)
        least = text_scores.LEAST_ROWS
        if mean is None:
            return [f"No average: no language has {least} rows or more."]
        if len(averaged) == len(self.languages):
            return []
        return [
            f"The average is over the {len(averaged)} of {len(self.languages)} languages with "
            f"{least} rows or more."
        ]

    def _likelihood_notes(self) -> list[str]:
        found = self.likelihood
        notes = [
            f"cross-entropy {found.cross_entropy:.4f} nats  perplexity {found.perplexity:.2f}  "
            f"token accuracy {found.accuracy:.4f}  over {found.tokens:,} tokens"
        ]
        notes += [f"{name}: sacrebleu {text}" for name, text in text_scores.signatures().items()]
        if found.rows_too_long:
            count = found.rows_too_long
            notes.append(f"{count} rows are too long for the cross-entropy: left out.")
        if self.sources_cut:
            notes.append(f"Warning: {self.sources_cut} sources were too long and were cut.")
        return notes

    def _sample_notes(self) -> list[str]:
        count = len(self.rows)
        samples = min(_SAMPLES, count)
        notes = []
        for number in range(samples):
            index = (2 * number + 1) * count // (2 * samples)
            row = self.rows[index]
            notes.append(f"\n{row.language:>11}  {row.source}\n  reference  {row.target}")
            notes.append(f"translation  {self.translations[index]}")
        return notes


def choose_rows(
    rows: Sequence[Row], split: str, languages: Sequence[str] = (), limit: int | None = None
) -> list[Row]:
    """Returns the rows to score.

    Args:
      languages: source languages to score, in this order; empty: all, sorted.
      limit: the largest number of rows per language; a fixed random choice of them is taken.

    Raises:
      UserError: a language has no row, or the split is empty.
    """
    by_language = rows_by_language(rows)
    for language in languages:
        names.check(language, by_language, f"`languages`: {split} has no rows of {language!r}")
    chosen = []
    for language in languages or sorted(by_language):
        members = by_language[language]
        kept = np.sort(permutation(len(members), 0)[: limit or len(members)])
        chosen += [members[index] for index in kept]
    if not chosen:
        raise UserError(f"`split={split}`: the run's corpus has no rows in it")
    return chosen


@EVALUATIONS.register("lingvo_gshard.tasks.translation.TranslationTask")
def measure(
    runtime: EvaluationRuntime,
    input_: TranslationInput,
    split: str,
    progress: Progress = SILENT,
    *,
    languages: Sequence[str] = (),
    max_rows_per_language: int | None = None,
    shuffled: bool = True,
    translate: Translate,
) -> TranslationScores:
    """Translates a split and scores the translations.

    Empty `languages` are all. A limit of rows per language takes a fixed random choice of them.
    `shuffled` also scores shuffled sources; see `LanguageScores`.
    """
    rows = choose_rows(input_.rows(split), split, languages, max_rows_per_language)
    progress.begin("Cross-entropy", "rows", len(rows))
    likelihoods = measure_by_language(runtime, input_, rows, progress)
    sources = [row.source for row in rows]
    progress.begin("Translating", "rows", len(rows))
    translations = translate(sources, progress)
    scores = text_scores.score_languages(
        [row.language for row in rows],
        sources,
        [row.target for row in rows],
        translations.texts,
        shuffled,
    )
    return TranslationScores(rows, translations.texts, len(translations.cut), scores, likelihoods)


def _likelihood(found: Likelihood) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "perplexity": found.perplexity}


def _cells(scores: LanguageScores, with_shuffled: bool) -> list[str]:
    cells = [f"{scores.rows:,}"]
    shuffled = [scores.shuffled] if with_shuffled else []
    for score in (scores.translated, *shuffled, scores.copied):
        cells += [f"{score.chrf:.1f}", f"{score.bleu:.1f}"] if score else ["-", "-"]
    return cells
