"""DecodingOptions: how the tokens of one request are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

from lingvo_gshard.core import Options, UserError, option
from lingvo_gshard.wings.inference.decoding.state import SearchKind


@dataclasses.dataclass(frozen=True)
class DecodingOptions(Options):
    """Options for the choice of a text's tokens.

    With a temperature tokens are drawn, else the best ones are searched for. Log-probabilities are
    always the model's own: before temperature, penalties and restrictions.

    Beam search ranks by
    `log(p) / ((5 + length) / 6) ** length_exponent + coverage_weight * coverage` (arXiv 1609.08144,
    equation 14). For top_p see arXiv 1904.09751, min_p 2407.01082, repetition_penalty 1909.05858.

        >>> options = gshard.DecodingOptions(beam_size=1, temperature=0.8, top_p=0.9)
        >>> options.draws
        True
    """

    beam_size: int = option(
        4,
        "Hypotheses kept for each text; 1 is greedy decoding, several times as fast. Drawing needs "
        "1.",
        minimum=1,
    )
    best: int = option(
        1,
        "Texts to return for each one: the best hypotheses of the beam, or independent draws.",
        minimum=1,
    )
    length_exponent: float = option(
        1.0,
        "How much beam search favors longer texts; 0 disables it, and less favors shorter ones.",
    )
    coverage_weight: float = option(
        0.0,
        "How much beam search favors texts that attend to all of the source; 0 disables it.",
        minimum=0,
    )
    temperature: float = option(
        0.0,
        "Divides the logits that tokens are drawn by: values below 1 favor likely tokens; 0 draws "
        "none and takes the likeliest.",
        minimum=0,
    )
    top_k: int = option(0, "Draws from this many likeliest tokens; 0: from all.", minimum=0)
    top_p: float = option(
        1.0,
        "Draws from the fewest tokens, of those that top_k leaves, whose probabilities reach this "
        "share of theirs; 1: from all.",
        above=0,
        maximum=1,
    )
    min_p: float = option(
        0.0,
        "Draws from tokens at least this much as likely as the likeliest one; 0: from all.",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = option(
        1.0,
        "Divides the positive logits of tokens that occurred, and multiplies negative ones: values "
        "above 1 make them less likely. Needs a temperature.",
        above=0,
    )
    seed: int | None = option(
        None,
        "Seed of the draws; another one gives other texts. Without one, each request draws a seed "
        "and tells it.",
        minimum=0,
    )
    most_tokens: int = option(
        0,
        "Largest number of new tokens, the end counted; 0: twice those of the source and 10 more, "
        "or, of a language model, as many as its row has room for, at least half a row.",
        minimum=0,
    )
    least_tokens: int = option(0, "Smallest number of new tokens, the end counted.", minimum=0)
    allowed_tokens: tuple[int, ...] = option(
        (), "The only ids to choose from, besides those that end a text; none: all.", minimum=0
    )
    forbidden_tokens: tuple[int, ...] = option(
        (), "Ids that are not chosen, those that end a text included.", minimum=0
    )
    stop: tuple[str, ...] = option(
        (), "Texts that end a text, which then lacks them. Not for beam search. None is empty."
    )

    def __post_init__(self):
        super().__post_init__()
        if "" in self.stop:
            raise UserError(
                f"stop[{self.stop.index('')}] is empty, which every text contains; a text of 1 "
                "character or more was expected"
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
        """The kind of program that chooses the tokens."""
        return SearchKind(
            beam=self.beam_size,
            draws=self.draws,
            penalizes_repetition=self.repetition_penalty != 1,
            restricts_tokens=bool(self.allowed_tokens or self.forbidden_tokens),
            covers=self.coverage_weight > 0,
        )


# Default options of a language model that continues texts.
DRAWING = DecodingOptions(beam_size=1, temperature=1.0)


class DecodingFields(TypedDict, total=False):
    """The fields of `DecodingOptions`, for functions that take them as keyword arguments."""

    beam_size: int
    best: int
    length_exponent: float
    coverage_weight: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    most_tokens: int
    least_tokens: int
    allowed_tokens: tuple[int, ...]
    forbidden_tokens: tuple[int, ...]
    stop: tuple[str, ...]
