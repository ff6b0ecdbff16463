"""Scores complete texts: how likely a language model finds each of their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.wings.inference.decoding.state import StateShape
from lingvo_gshard.wings.inference.engine import shapes
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN, ModelFacts
from lingvo_gshard.wings.inference.programs.executables import SCORES, ProgramKey


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """The scores of the tokens of a text but the first, which is given.

    Attributes:
      log_probabilities: float32 [T-1], the log-probability of each token, given those before it.
      likeliest: int32 [T-1], the token that the model finds likeliest in its place.
      largest: float32 [T-1], the log-probability of that token.
    """

    log_probabilities: np.ndarray
    likeliest: np.ndarray
    largest: np.ndarray


def score(engine: Engine, tokens: Sequence[int]) -> TokenScores:
    """Returns the scores of a text, computed in one pass. The program is compiled on first use.

    A text has at most one token more than the model has positions.
    """
    key = scoring_program(engine.facts, len(tokens))
    assert key.shape is not None
    row = np.full((1, key.shape.length + 1), NO_TOKEN, np.int32)
    row[0, : len(tokens)] = tokens
    found = engine.executables.get(key).call(*engine.weights, row)
    return TokenScores(*(np.asarray(each)[0, : len(tokens) - 1] for each in found))


def scoring_program(facts: ModelFacts, tokens: int) -> ProgramKey:
    """Returns the key of the program that `score` runs."""
    given = max(tokens - 1, 1)
    length = next((n for n in shapes.LENGTHS if n >= given), max(facts.most_positions, given))
    length = min(length, max(facts.most_positions, given))
    return ProgramKey(SCORES, shape=StateShape(1, length, 0))
