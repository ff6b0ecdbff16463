"""Scores of a language model on a text: per token, per word and per byte.

The text is the documents of a split after cleaning. The model predicts each token and the end of
each document (EOS); the cost of both counts in every score. Bytes are counted in the UTF-8 text,
and words are separated by white space. The end of a document is neither a byte nor a word. Bits per
byte and perplexity per word can be compared between models with different vocabularies, perplexity
per token cannot.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import SILENT, Progress, UserError
from lingvo_gshard.core.lazy import bleu, chrf
from lingvo_gshard.data import TextInput, TextSize, packing, permutation
from lingvo_gshard.tasks import (
    EVALUATIONS,
    Evaluation,
    EvaluationRuntime,
    Table,
    WeightedMeans,
    perplexity,
)

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
    """Returns the scores of each language, in the order of first occurrence."""
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
    """Averages scores over languages that have enough rows, each counting the same.

    Returns the mean scores, with sums of rows and unique references, or None if no language has
    `least_rows`; and the languages averaged.
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

    Each row gets the next row in this order. A row is its own partner only if its language has no
    other row.
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


_LARGEST_PERPLEXITY_PER_WORD = 1e6


@dataclasses.dataclass(frozen=True)
class SourceScores:
    """Scores of the texts of one source.

    Attributes:
      cross_entropy: nats per token, ends of documents counted as tokens.
      perplexity: per token.
      accuracy: share of tokens that the model finds most likely.
    """

    cross_entropy: float
    perplexity: float
    accuracy: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class TextScores(Evaluation):
    """Scores of a text.

    Attributes:
      cross_entropy: nats per token, ends of documents counted as tokens.
      perplexity: per token.
      accuracy: share of tokens that the model finds most likely.
      tokens: number of tokens, ends of documents included.
      sources: source -> scores of its texts; empty if they are not scored by source.
    """

    cross_entropy: float
    perplexity: float
    perplexity_per_word: float
    bits_per_byte: float
    accuracy: float
    tokens: int
    documents: int
    words: int
    bytes: int
    sources: dict[str, SourceScores] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_means(
        cls, cross_entropy: float, accuracy: float, tokens: int, size: TextSize
    ) -> TextScores:
        """Returns the scores of a text from its mean nats per token and its share of right tokens.

        Ends of documents count as tokens.
        """
        nats = cross_entropy * tokens
        return cls(
            cross_entropy=cross_entropy,
            perplexity=perplexity(cross_entropy),
            perplexity_per_word=perplexity(nats / size.words) if size.words else math.nan,
            bits_per_byte=nats / math.log(2) / size.bytes if size.bytes else math.nan,
            accuracy=accuracy,
            tokens=tokens,
            **dataclasses.asdict(size),
        )

    @property
    def size(self) -> str:
        return f"{self.documents:,} documents"

    def to_record(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return found if self.sources else {k: v for k, v in found.items() if k != "sources"}

    def table(self) -> Table:
        """Returns a row for each score, with the amount it is taken over.

        Perplexity per word grows exponentially with the cost of a word. Beyond a million it is left
        out, since it says no more than that the model knows no words yet.
        """
        words = "perplexity per word", f"{self.perplexity_per_word:,.1f}", f"{self.words:,} words"
        rows = [
            ("bits per byte", f"{self.bits_per_byte:.4f}", f"{self.bytes:,} bytes"),
            *([] if self._is_perplexity_per_word_useless else [words]),
            ("perplexity per token", f"{self.perplexity:,.2f}", f"{self.tokens:,} tokens"),
            ("cross-entropy", f"{self.cross_entropy:.4f}", "nats per token"),
            ("token accuracy", f"{self.accuracy:.4f}", ""),
        ]
        rows += [
            (f"perplexity of {name}", f"{one.perplexity:,.2f}", f"{one.tokens:,} tokens")
            for name, one in self.sources.items()
        ]
        return Table(("measure", "", "of"), rows, text_columns=(0, 2))

    def notes(self) -> list[str]:
        """Returns why perplexity per word is not in the table, if it is not."""
        if not self._is_perplexity_per_word_useless:
            return []
        return ["Perplexity per word is above a million: this model has hardly learned any words."]

    @property
    def _is_perplexity_per_word_useless(self) -> bool:
        return self.perplexity_per_word > _LARGEST_PERPLEXITY_PER_WORD


@EVALUATIONS.register("lingvo_gshard.tasks.language_model.LanguageModelTask")
def measure(
    runtime: EvaluationRuntime,
    input_: TextInput,
    split: str,
    progress: Progress = SILENT,
    by_source: bool = False,
) -> TextScores:
    """Returns the scores of a split, packed and cut into windows as in training.

    With `by_source`, it scores the texts of each source, too. Raises UserError without a document.
    """
    size = input_.text_size(split)
    if not size.documents:
        raise UserError(f"`split={split}`: the run's corpus has no documents in it")
    progress.begin("Cross-entropy", "tokens", input_.count_tokens(split))
    found = WeightedMeans()
    if not by_source:
        counted, _ = _add(found, runtime, input_.evaluation_batches(split), progress, 0)
        means = found.means()
        return TextScores.from_means(means["cross_entropy"], means["accuracy"], counted, size)
    table, sources, total, read = input_.table(split), {}, 0, 0
    parts = collections.defaultdict(list)
    for group in table.groups:
        parts[group.source or group.language or "all"].append(group)
    for name, groups in sorted(parts.items()):
        own, counted = WeightedMeans(), 0
        for group in groups:
            batches = input_.pack_table(table, range(group.begin, group.begin + group.rows))
            tokens, read = _add(own, runtime, batches, progress, read)
            counted += tokens
        means = own.means()
        found.add({key: (value, counted) for key, value in means.items()})
        entropy = means["cross_entropy"]
        sources[name] = SourceScores(entropy, perplexity(entropy), means["accuracy"], counted)
        total += counted
    means = found.means()
    whole = TextScores.from_means(means["cross_entropy"], means["accuracy"], total, size)
    return dataclasses.replace(whole, sources=sources)


def _add(
    found: WeightedMeans,
    runtime: EvaluationRuntime,
    batches: Iterable[packing.Batch],
    progress: Progress,
    before: int,
) -> tuple[int, int]:
    """Adds the metrics of batches. Returns how many tokens count in the loss, and were read.

    `progress` is told how many were read, with those `before`.
    """
    counted, read = 0, before
    for batch in batches:
        found.add(runtime.eval_step(batch))
        read += int(np.count_nonzero(batch["target_segments"]))
        # Of a conversation, only some tokens count in the loss.
        counted += int(np.count_nonzero(batch.get("target_marks", batch["target_segments"])))
        progress.update(read)
    return counted, read
