"""Best: the step of a run whose dev metric is the best so far."""

from __future__ import annotations

import math

import msgspec

# The last words of metrics that are better if they are higher.
_HIGHER = ("accuracy", "bleu", "chrf")


class Best(msgspec.Struct, frozen=True):
    """The best evaluation of a run so far.

    Attributes:
      metric: name of the metric, such as "dev/loss".
      value: the metric at `step`.
      step: the step that was evaluated. The first of equal ones.
      evaluations_since: number of later evaluations.
    """

    metric: str
    value: float
    step: int
    evaluations_since: int = 0

    def after(self, step: int, value: float) -> Best:
        """Returns the best after one more evaluation.

        Args:
          step: the step that was evaluated.
          value: the metric. One that is not a number is never the best.
        """
        if self._is_better(value):
            return Best(self.metric, value, step)
        return msgspec.structs.replace(self, evaluations_since=self.evaluations_since + 1)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or math.isnan(self.value):
            return math.isnan(self.value) and not math.isnan(value)
        return value > self.value if is_higher_better(self.metric) else value < self.value


def is_higher_better(metric: str) -> bool:
    """Returns whether a higher value of a metric is better, as with accuracy."""
    return metric.lower().endswith(_HIGHER)
