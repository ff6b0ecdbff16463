"""StatePart: arrays that a training step keeps beside weights and moments, and what they decide.

A trainer composes its parts in order. A new one is a subclass and a line in `Trainer.parts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap


@dataclasses.dataclass(frozen=True)
class Seen:
    """Facts on a step before its update.

    Attributes:
      loss: the training loss, a scalar.
      norm: the norm of the gradient before clipping, a float32 scalar.
      finite: a bool scalar, whether both are finite.
      measured: what the backward pass measured for a part, by the part's name; see `before`.
    """

    loss: tf.Tensor
    norm: tf.Tensor
    finite: tf.Tensor
    measured: Mapping[str, NestedMap]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgment of a part on a step.

    Attributes:
      is_skipped: whether the step must change neither weights nor moments; a bool scalar.
      goes_on: whether training goes on although the step is not finite; a bool scalar.
      state: the part after the step, if the training goes on; None if `after` computes it.
      metrics: name -> scalar.
    """

    is_skipped: tf.Tensor | bool = False
    goes_on: tf.Tensor | bool = False
    state: NestedMap | None = None
    metrics: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The update of a step.

    Attributes:
      theta: the weights after the step.
      updates: the number of earlier updates of the weights, an int32 scalar.
      is_skipped: a bool scalar, whether the weights are those before the step.
      stopped: a bool scalar, whether the training has ended.
    """

    theta: NestedMap
    updates: tf.Tensor
    is_skipped: tf.Tensor
    stopped: tf.Tensor


class StatePart:
    """Arrays of a trainer's state, and how a step uses and changes them.

    Attributes:
      name: the name of the part in the state.
    """

    name: ClassVar[str]

    def specs(self) -> NestedMap:
        """Returns the part's tree of VariableSpec."""
        raise NotImplementedError(f"{type(self).__name__} defines no specs")

    def begin(self, theta: NestedMap) -> NestedMap:
        """Returns the part before the first step, by default the initial values of its specs."""
        del theta
        return self.specs().transform(lambda spec: spec.init(tf.zeros([2], tf.int32)))

    def before(self, own: NestedMap) -> dict[str, Any]:
        """Returns arguments of `Gradients` that the part has for the forward pass."""
        del own
        return {}

    def skipped_so_far(self, own: NestedMap) -> tf.Tensor | int:
        """Returns the number of earlier steps that the part has skipped."""
        del own
        return 0

    def judge(self, own: NestedMap, seen: Seen) -> Verdict:
        """Returns what the part says of a step."""
        del own, seen
        return Verdict()

    def after(self, own: NestedMap, seen: Seen, verdict: Verdict, outcome: Outcome) -> NestedMap:
        """Returns the part after a step."""
        del seen
        assert verdict.state is not None, f"{type(self).__name__} defines no state after a step"
        pairs = zip(own.flatten(), verdict.state.flatten(), strict=True)
        return own.pack(tf.where(outcome.stopped, *pair) for pair in pairs)

    def metrics(self, own: NestedMap, new: NestedMap, verdict: Verdict) -> Mapping[str, tf.Tensor]:
        """Returns metrics of a step, name -> scalar.

        Args:
          own: the part before the step.
          new: the part after it.
          verdict: what the part said of the step.
        """
        del own, new
        return verdict.metrics

    def goes_on(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether training goes on after a step that is not finite, by its metrics."""
        del metrics
        return False
