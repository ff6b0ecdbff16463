"""Scores of a language model on a text: per token, per word and per byte.

The text is the documents of a split after cleaning. The model predicts each token and the end of
each document (EOS); the cost of both counts in every score. Bytes are those of the text in UTF-8,
words are separated by white space; an end of a document is neither. Bits per byte and perplexity
per word can be compared between models with different vocabularies, perplexity per token cannot.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.language_model_input import LanguageModelInput, TextSize
from lingvo_gshard.tasks.evaluation.evaluation import (
    Evaluation,
    EvaluationRuntime,
    ShowProgress,
    Table,
    no_progress,
)
from lingvo_gshard.tasks.evaluation.means import WeightedMeans, perplexity

_LARGEST_PERPLEXITY_PER_WORD = 1e6


@dataclasses.dataclass(frozen=True)
class TextScores(Evaluation):
    """Scores of a text.

    Attributes:
      cross_entropy: nats per token, ends of documents counted as tokens.
      perplexity: per token.
      perplexity_per_word: per word.
      bits_per_byte: per byte.
      accuracy: share of tokens that the model finds most likely.
      tokens: number of tokens, ends of documents included.
      documents: number of documents.
      words: number of words.
      bytes: number of bytes.
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

    @classmethod
    def from_means(
        cls, cross_entropy: float, accuracy: float, tokens: int, size: TextSize
    ) -> TextScores:
        """Returns the scores of a text.

        Args:
          cross_entropy: mean nats per token.
          accuracy: share of tokens predicted.
          tokens: number of tokens, ends of documents included.
          size: number of documents, words and bytes.
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
        """Returns the scores by name."""
        return dataclasses.asdict(self)

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
        return Table(("measure", "", "of"), rows, text_columns=(0, 2))

    def notes(self) -> list[str]:
        """Returns why perplexity per word is not in the table, if it is not."""
        if not self._is_perplexity_per_word_useless:
            return []
        return ["Perplexity per word is above a million: this model has hardly learned any words."]

    @property
    def _is_perplexity_per_word_useless(self) -> bool:
        return self.perplexity_per_word > _LARGEST_PERPLEXITY_PER_WORD


def measure(
    runtime: EvaluationRuntime,
    input_: LanguageModelInput,
    split: str,
    show_progress: ShowProgress = no_progress,
) -> TextScores:
    """Returns the scores of a split, packed and cut into windows as in training.

    Raises:
      UserError: the split has no document.
    """
    size = input_.text_size(split)
    if not size.documents:
        raise UserError(f"`split={split}`: the run's corpus has no documents in it")
    means, tokens = WeightedMeans(), 0
    with show_progress("Cross-entropy", "tokens", input_.count_tokens(split)) as progress:
        for batch in input_.evaluation_batches(split):
            means.add(runtime.eval_step(batch))
            tokens += int(np.count_nonzero(batch["target_segments"]))
            progress.update(tokens)
    found = means.means()
    return TextScores.from_means(found["cross_entropy"], found["accuracy"], tokens, size)
