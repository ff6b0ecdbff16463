"""Row: the host's view of one text under way, and the texts that come of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.decoding.kinds import BEAM_RECORD
from lingvo_gshard.inference.requests import (
    CANCELED,
    END,
    LENGTH,
    STOP,
    Answer,
    Hypothesis,
    NewTokens,
)

# Ranks at or below this are of hypotheses that do not exist.
_IMPOSSIBLE = -1e8


class Row:
    """One text of a request, in one row of a lane.

    Attributes:
      answer: where events go.
      text: number of the text among those of the request.
      limit: the largest number of new tokens.
      generated: the number of new tokens so far.
      is_done: whether the text is complete.
      passes: how often other texts got a place that this one waited for.
      created: when it began to wait, in the time of time.monotonic.
    """

    def __init__(self, answer: Answer, text: int, limit: int):
        self.answer, self.text, self.limit = answer, text, limit
        self.generated, self.is_done, self.passes = 0, False, 0
        self.created = time.monotonic()

    @property
    def position(self) -> int:
        """Positions that the model has computed: given tokens and new ones, without the last."""
        return len(self.answer.request.given) - 1 + self.generated

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        """Adds what the model chose in some steps.

        Args:
          records: name -> [steps,W].
          is_active: whether the text goes on.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends the text where it is."""
        self.is_done = True

    def hypotheses(self) -> list[Hypothesis]:
        """Returns the texts, the best first."""
        raise NotImplementedError


class TokenRow(Row):
    """A text that is drawn, or decoded greedily."""

    def __init__(self, answer: Answer, text: int, limit: int, end_ids: Sequence[int]):
        super().__init__(answer, text, limit)
        self._end_ids, self._reason = end_ids, LENGTH
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        tokens = records["token_BW"][:, 0].tolist()
        log_probabilities = records["log_probability_BW"][:, 0].tolist()
        self.generated += len(tokens)
        self.is_done = not is_active
        request = self.answer.request
        before = len(self._tokens)
        # One by one: how many tokens a call makes depends on other texts, and the text does not.
        for token, log_probability in zip(tokens, log_probabilities, strict=True):
            self._tokens.append(token)
            self._log_probabilities.append(log_probability)
            if token in self._end_ids:
                self._reason = END
            elif request.should_stop and request.should_stop(self._tokens):
                self._reason, self.is_done = STOP, True
                break
        if request.streams and len(self._tokens) > before:
            new = tuple(self._tokens[before:]), tuple(self._log_probabilities[before:])
            self.answer.put(NewTokens(self.text, *new))
        if self.answer.is_canceled and not self.is_done:
            self.cancel()

    def cancel(self) -> None:
        super().cancel()
        self._reason = CANCELED

    def hypotheses(self) -> list[Hypothesis]:
        has_end = self._reason == END
        tokens = self._tokens[:-1] if has_end else self._tokens
        log_probabilities = tuple(self._log_probabilities)
        score = float(sum(log_probabilities))
        end = self._tokens[-1] if has_end else None
        return [Hypothesis(tuple(tokens), log_probabilities, score, self._reason, end)]


class BeamRow(Row):
    """A text that is searched for with a beam."""

    def __init__(self, answer: Answer, text: int, limit: int, end_ids: Sequence[int]):
        super().__init__(answer, text, limit)
        self._end_ids = end_ids
        self._records: dict[str, list[np.ndarray]] = {name: [] for name in BEAM_RECORD}

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        for name, values in records.items():
            # A copy: the next call of a program may reuse the memory.
            self._records[name].append(np.array(values))
        self.generated += len(records["token_BW"])
        self.is_done = not is_active or self.answer.is_canceled

    def hypotheses(self) -> list[Hypothesis]:
        if not self.generated:
            return []
        found = {name: np.concatenate(parts) for name, parts in self._records.items()}
        ranked = [
            (float(ranks[tuple(place)]), kind, *map(int, place))
            for kind, ranks in ((END, found["end_BWe"]), (LENGTH, found["last_BW"]))
            for place in np.argwhere(ranks > _IMPOSSIBLE)
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[2]))
        wanted = self.answer.request.options.best
        return [self._hypothesis(found, *entry) for entry in ranked[:wanted]]

    def _hypothesis(
        self, found: dict[str, np.ndarray], rank: float, kind: str, step: int, w: int, e: int = 0
    ) -> Hypothesis:
        """Returns a hypothesis of the beam before (END, with an id e) or after (LENGTH) a step."""
        tokens, gains, end = [], [], None
        if kind == END:
            gains.append(float(found["end_log_probability_BWe"][step, w, e]))
            end, step = self._end_ids[e], step - 1
        while step >= 0:
            tokens.append(int(found["token_BW"][step, w]))
            gains.append(float(found["log_probability_BW"][step, w]))
            step, w = step - 1, int(found["parent_BW"][step, w])
        return Hypothesis(tuple(tokens[::-1]), tuple(gains[::-1]), rank, kind, end)
