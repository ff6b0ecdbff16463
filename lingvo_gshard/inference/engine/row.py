"""Row: the host's view of one text under way, and the texts that come of it."""

from __future__ import annotations

import time

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

    def __init__(self, answer: Answer, text: int, limit: int, eos_id: int):
        super().__init__(answer, text, limit)
        self._eos_id, self._reason = eos_id, LENGTH
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        tokens = records["token_BW"][:, 0].tolist()
        log_probabilities = records["log_probability_BW"][:, 0].tolist()
        self.generated += len(tokens)
        self._tokens += tokens
        self._log_probabilities += log_probabilities
        self.is_done = not is_active
        request = self.answer.request
        if request.streams and tokens:
            event = NewTokens(self.text, tuple(tokens), tuple(log_probabilities))
            self.answer.put(event)
        if self._tokens and self._tokens[-1] == self._eos_id:
            self._reason = END
        elif request.should_stop and request.should_stop(self._tokens):
            self._reason, self.is_done = STOP, True
        elif self.answer.is_canceled and not self.is_done:
            self.cancel()

    def cancel(self) -> None:
        super().cancel()
        self._reason = CANCELED

    def hypotheses(self) -> list[Hypothesis]:
        tokens = self._tokens[:-1] if self._reason == END else self._tokens
        log_probabilities = tuple(self._log_probabilities)
        score = float(sum(log_probabilities))
        return [Hypothesis(tuple(tokens), log_probabilities, score, self._reason)]


class BeamRow(Row):
    """A text that is searched for with a beam."""

    def __init__(self, answer: Answer, text: int, limit: int):
        super().__init__(answer, text, limit)
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
        ends, lasts = found["end_BW"], found["last_BW"]
        ranked = [
            (float(ranks[step, w]), kind, int(step), int(w))
            for kind, ranks in ((END, ends), (LENGTH, lasts))
            for step, w in np.argwhere(ranks > _IMPOSSIBLE)
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[2]))
        wanted = self.answer.request.options.best
        return [self._hypothesis(found, *entry) for entry in ranked[:wanted]]

    def _hypothesis(
        self, found: dict[str, np.ndarray], rank: float, kind: str, step: int, w: int
    ) -> Hypothesis:
        """Returns a hypothesis of the beam before (END) or after (LENGTH) a step."""
        tokens, gains = [], []
        if kind == END:
            gains.append(float(found["end_log_probability_BW"][step, w]))
            step -= 1
        while step >= 0:
            tokens.append(int(found["token_BW"][step, w]))
            gains.append(float(found["log_probability_BW"][step, w]))
            step, w = step - 1, int(found["parent_BW"][step, w])
        return Hypothesis(tuple(tokens[::-1]), tuple(gains[::-1]), rank, kind)
