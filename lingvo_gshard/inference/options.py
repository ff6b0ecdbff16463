"""DecodingOptions: how the tokens of one request are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.decoding.kinds import SearchKind


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """How the tokens of a text are chosen.

    With a temperature tokens are drawn, else the best ones are searched for. Log-probabilities are
    always the model's own: before temperature, penalties and restrictions.

    Attributes:
      beam_size: hypotheses kept for each text; 1 is greedy decoding. Drawing needs 1.
      best: texts to return: the best hypotheses of the beam, or independent draws.
      length_exponent: how much the search favors longer texts; 0 disables it.
      coverage_weight: how much the search favors texts that attend to all of the source; 0
        disables it.
      temperature: divides the logits of the distribution that tokens are drawn from; 0 draws none.
      top_k: draws from this many likeliest tokens; 0: from all.
      top_p: draws from the fewest tokens that together are this likely; 1: from all.
      min_p: draws from tokens at least this much as likely as the likeliest one; 0: from all.
      repetition_penalty: divides the positive logits of tokens that occurred, and multiplies
        negative ones; 1 disables it. For drawing.
      seed: another seed draws other texts.
      most_tokens: the largest number of new tokens, the end counted; 0: twice the source and 10
        more, or, of a language model, as many as its row has room for, at least half a row.
      least_tokens: the smallest number of new tokens, the end counted.
      allowed_tokens: ids to choose from, besides those that end a text; empty: all.
      forbidden_tokens: ids that are not chosen, those that end a text included.
      stop: texts that end a text, which then lacks them. Not with a beam. None is empty.
    """

    beam_size: int = 4
    best: int = 1
    length_exponent: float = 1.0
    coverage_weight: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    most_tokens: int = 0
    least_tokens: int = 0
    allowed_tokens: tuple[int, ...] = ()
    forbidden_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; {least} or more was expected")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; more than 0 and at most 1 was expected")
        if self.min_p > 1:
            raise UserError(f"min_p is {self.min_p}; at most 1 was expected")
        if "" in self.stop:
            raise UserError(
                f"stop[{self.stop.index('')}] is empty, which every text contains; a text of 1 "
                "character or more was expected"
            )
        if self.repetition_penalty <= 0:
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}; more than 0 was expected"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Raises ValueError if options do not go together."""
        draws = self.draws
        if draws and self.beam_size > 1:
            raise UserError(
                f"temperature={self.temperature} draws tokens and beam_size={self.beam_size} "
                "searches; set one of beam_size=1 and temperature=0"
            )
        if not draws and self.best > self.beam_size:
            raise UserError(
                f"best is {self.best}, but a search with beam_size={self.beam_size} finds "
                f"{self.beam_size} texts at most"
            )
        if not draws and self.repetition_penalty != 1:
            raise UserError("repetition_penalty needs a temperature: it applies to drawing")
        if self.coverage_weight and self.beam_size == 1:
            raise UserError("coverage_weight needs beam_size > 1: it ranks hypotheses")
        if self.stop and self.beam_size > 1:
            raise UserError("stop needs beam_size=1: hypotheses of a beam end by themselves")
        if 0 < self.most_tokens < self.least_tokens:
            raise UserError(
                f"least_tokens is {self.least_tokens}, more than most_tokens, {self.most_tokens}"
            )

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; else the best ones are searched for."""
        return self.temperature > 0

    @property
    def texts(self) -> int:
        """The number of texts that are decoded independently for one request."""
        return self.best if self.draws else 1

    def row_values(self) -> dict[str, Any]:
        """Returns the values of the leaves of a decoding state that options alone decide."""
        return {
            "least_B": self.least_tokens,
            "wanted_B": self.best,
            "length_exponent_B": self.length_exponent,
            "coverage_weight_B": self.coverage_weight,
            "temperature_B": self.temperature,
            "top_k_B": self.top_k,
            "top_p_B": self.top_p,
            "min_p_B": self.min_p,
            "repetition_B": self.repetition_penalty,
        }

    @property
    def kind(self) -> SearchKind:
        """What a program computes to choose the tokens."""
        return SearchKind(
            beam=self.beam_size,
            draws=self.draws,
            penalizes_repetition=self.repetition_penalty != 1,
            restricts_tokens=bool(self.allowed_tokens or self.forbidden_tokens),
            covers=self.coverage_weight > 0,
        )


_LEAST = {
    "beam_size": 1,
    "best": 1,
    "coverage_weight": 0,
    "temperature": 0,
    "top_k": 0,
    "min_p": 0,
    "most_tokens": 0,
    "least_tokens": 0,
}

# How a language model continues texts unless told otherwise.
DRAWING = DecodingOptions(beam_size=1, temperature=1.0)
