"""The texts of `gshard-bench decode`, and the number of tokens generated for each."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from lingvo_gshard.decoding.model_facts import ModelFacts

TRANSLATION, LANGUAGE_MODEL = "translation", "language_model"

# Sentences that peers decode together. Our lanes have as many rows.
BATCH_ROWS = 32
_ONE_SENTENCE_TOKENS = 32
_PROMPT, _LONG_PROMPT, _CONTINUATION = 8, 129, 64


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts that other engines decode together.

    Attributes:
      texts: ids of the sources without an end, or of prompts without the id before all texts.
      tokens: the number of tokens that every text gets, neither more nor fewer.
    """

    texts: tuple[tuple[int, ...], ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: what is measured.
      model: TRANSLATION or LANGUAGE_MODEL.
      beam: hypotheses of each text; 1 is greedy decoding.
      batches: the texts.
    """

    name: str
    model: str
    beam: int
    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens in all texts that are returned."""
        return sum(len(batch.texts) * batch.tokens for batch in self.batches)

    @property
    def rows(self) -> int:
        """The number of texts."""
        return sum(len(batch.texts) for batch in self.batches)


def translation_cases(sources: Sequence[Sequence[int]]) -> list[Case]:
    """Returns the cases of a translation model: all sentences in batches, and one of them.

    Sentences are sorted by length, the longest first. All translations of a batch get as many
    tokens as its longest source has.

    Args:
      sources: ids of the sentences.
    """
    ordered = sorted((tuple(ids) for ids in sources), key=len, reverse=True)
    batches = []
    for first in range(0, len(ordered), BATCH_ROWS):
        texts = tuple(ordered[first : first + BATCH_ROWS])
        batches.append(Batch(texts, len(texts[0])))
    one = min(ordered, key=lambda ids: abs(len(ids) - _ONE_SENTENCE_TOKENS))
    alone = (Batch((one,), _ONE_SENTENCE_TOKENS),)
    many = f"{len(ordered):,} sentences"
    return [
        Case(f"greedy, {many}", TRANSLATION, 1, tuple(batches)),
        Case(f"beam 4, {many}", TRANSLATION, 4, tuple(batches)),
        Case("greedy, one sentence", TRANSLATION, 1, alone),
        Case("beam 4, one sentence", TRANSLATION, 4, alone),
    ]


def language_model_cases(facts: ModelFacts, seed: int = 0) -> list[Case]:
    """Returns the cases of a language model: texts of random ids, and long prompts.

    Args:
      facts: what the host knows of the model.
      seed: of the ids.
    """
    draw = random.Random(seed)
    ids = [i for i in range(facts.vocabulary_size) if i not in (facts.bos_id, *facts.end_ids)]

    def case(name: str, rows: int, prompt: int, tokens: int) -> Case:
        # The id before all texts is one position, and the last token is never computed.
        prompt = min(prompt, facts.most_positions - 1)
        tokens = min(tokens, facts.most_positions - prompt)
        texts = tuple(tuple(draw.choices(ids, k=prompt)) for _ in range(rows))
        return Case(name.format(prompt + 1), LANGUAGE_MODEL, 1, (Batch(texts, tokens),))

    found = []
    for rows in (1, BATCH_ROWS):
        found.append(case(f"language model, batch {rows}", rows, _PROMPT, _CONTINUATION))
    for rows in (1, BATCH_ROWS):
        found.append(case(f"prompt of {{}} tokens, batch {rows}", rows, _LONG_PROMPT - 1, 1))
    return found
