"""How well a language model expects a text: by token, by word and by byte.

The text is a split's documents as cleaned. The model says each token of it and the end of each
document (EOS), whose cost counts in every figure. Bytes are those of the text in UTF-8, words what
white space sets apart; an end is neither. So bits per byte and perplexity per word are comparable
between models whatever their vocabularies, perplexity per token is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api.run import TrainedModel
from lingvo_gshard.data.language_model_input import TextSize
from lingvo_gshard.tools.console.progress import Progress
from lingvo_gshard.training.monitoring.metrics import WeightedMeans, perplexity

# Flags of gshard-evaluate that are about translations.
_OF_TRANSLATION = (
    "languages",
    "max_rows_per_language",
    "shuffled",
    "output",
    "beam_size",
    "length_exponent",
)


@dataclasses.dataclass(frozen=True)
class TextScores:
    """What a text costs a model. cross_entropy: nats per token, the ends of documents counted."""

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
    def of(cls, cross_entropy: float, accuracy: float, tokens: int, size: TextSize) -> TextScores:
        """Returns the scores of a text of so many tokens, documents, words and bytes."""
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

    def to_record(self) -> dict[str, float | None]:
        """Returns the scores as JSON values."""
        values = dataclasses.asdict(self)
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def check_flags(values: flags.FlagValues, name: str) -> None:
    """Raises ValueError for a flag that says how a translation is to be scored."""
    for flag in _OF_TRANSLATION:
        if values[flag].present:
            raise ValueError(
                f"--{flag} is about translations, and the run of {name} is a language model"
            )


def measure(
    trained: TrainedModel, split: str, on_progress: Callable[[int], None] | None = None
) -> TextScores:
    """Returns the scores of a split, every document of it packed and cut as in training.

    on_progress: called with the number of tokens done after each batch. Raises ValueError for a
    split without a document.
    """
    size = trained.input.text_size(split)
    if not size.documents:
        raise ValueError(f"--split={split}: the run's corpus has no documents in it")
    means, tokens = WeightedMeans(), 0
    for batch in trained.input.evaluation_batches(split):
        means.add(trained.runtime.eval_step(batch))
        tokens += int(np.count_nonzero(batch["target_segments"]))
        if on_progress:
            on_progress(tokens)
    found = means.means()
    return TextScores.of(found["cross_entropy"], found["accuracy"], tokens, size)


def evaluate(
    trained: TrainedModel, split: str, console: rich.console.Console, title: str
) -> dict[str, float | None]:
    """Measures a split, prints a table of its scores and returns them as JSON values."""
    total = trained.input.count_tokens(split)
    with Progress(console, "Cross-entropy", "tokens", total) as progress:
        scores = measure(trained, split, progress.update)
    console.print(f"{title}: {scores.documents:,} documents of {split}", highlight=False)
    console.print(_table(scores))
    return scores.to_record()


def _table(scores: TextScores) -> rich.table.Table:
    table = rich.table.Table("measure", rich.table.Column("", justify="right"), "of")
    table.add_row("bits per byte", f"{scores.bits_per_byte:.4f}", f"{scores.bytes:,} bytes")
    table.add_row(
        "perplexity per word", f"{scores.perplexity_per_word:,.1f}", f"{scores.words:,} words"
    )
    table.add_row("perplexity per token", f"{scores.perplexity:,.2f}", f"{scores.tokens:,} tokens")
    table.add_row("cross-entropy", f"{scores.cross_entropy:.4f}", "nats per token")
    table.add_row("token accuracy", f"{scores.accuracy:.4f}", "")
    return table
