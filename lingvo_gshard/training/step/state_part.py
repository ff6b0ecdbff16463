"""StepPart: what takes part in a training step; StatePart: with arrays of its own in the state.

A trainer is composed of the parts that are registered at `STEP_PARTS` and that its Params ask for.
A new one is a subclass in a module of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_gshard.core import NestedMap, Params, Seam, VariableSpec, tf
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.clipping import Clipping
from lingvo_gshard.training.step.optimizer import Optimizer


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
class Ingredients:
    """Holds what the parts of a trainer are made of."""

    params: Params
    task: Task
    optimizer: Optimizer
    theta_specs: NestedMap
    precision: Any


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of the weights in a step, before it is computed.

    Attributes:
      state: the state before the step.
      clipped: the gradients and how they are clipped.
      verdicts: what the parts of the state say of it, by name.
      updates: the number of earlier updates of the weights, an int32 scalar.
      is_skipped: a bool scalar, whether the step leaves the weights as they are.
      stopped: a bool scalar, whether the training has ended.
    """

    state: NestedMap
    clipped: Clipping
    seen: Seen
    verdicts: Mapping[str, Verdict]
    updates: tf.Tensor
    learning_rate: tf.Tensor
    is_skipped: tf.Tensor
    stopped: tf.Tensor


class StepPart:
    """Takes part in the steps of a trainer. Methods do nothing unless a subclass overrides them.

    Attributes:
      titles: parts of a checkpoint that it adds -> their names in messages.
      host_settings: the Params that keep arrays in host memory, such as `step.x = True`.
      accumulate: computes the gradients of a batch in parts; see `Gradients`. None: it does not.
    """

    titles: ClassVar[Mapping[str, str]] = {}
    host_settings: Sequence[str] = ()
    accumulate: Any = None

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds hyperparameters to the trainer's Params."""

    @classmethod
    def choose_precision(cls, p: Params, chosen: Any) -> Any:
        """Returns the Precision of a trainer, by default the one that `step.precision` names."""
        return chosen

    @classmethod
    def check_device(cls, precision: Any, platform: str, name: str, capability: str) -> None:
        """Checks that devices compute a step in its precision.

        Args:
          platform: jax's name of their platform.
          name: jax's name of such devices. They need not be in this machine.
          capability: the compute capability of a GPU, such as "9.0"; empty if it is not known.

        Raises:
          UserError: they do not.
        """

    @classmethod
    def device_notes(
        cls, precision: Any, task: Task, platform: str, has_kernels: bool
    ) -> Sequence[str]:
        """Returns sentences on what devices compute in another way than the Params say.

        Args:
          platform: jax's name of the devices' platform.
          has_kernels: whether the step uses the platform's kernels.
        """
        return ()

    @classmethod
    def of(cls, made: Ingredients) -> StepPart | None:
        """Returns the part of a trainer; None if its Params do not ask for it.

        Raises:
          UserError: hyperparameters contradict each other.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how it is made")

    def is_on_host(self, part: str, spec: VariableSpec) -> bool:
        """Returns whether an array of a part, such as "moments", is kept in host memory."""
        return False

    def update_weights(self, update: Update) -> tuple[NestedMap, NestedMap] | None:
        """Returns the weights and moments after a step; None leaves it to the optimizer."""
        return None

    def measure(self, update: Update, state: NestedMap) -> Mapping[str, tf.Tensor]:
        """Returns metrics of an update, name -> scalar, from the state after the step."""
        return {}

    def shown_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of a step without values that only other steps have."""
        return metrics


# The parts that trainers may have, beside weights and moments.
STEP_PARTS: Seam[type[StepPart]] = Seam("step_parts")


def part_titles() -> dict[str, str]:
    """Returns the parts that a checkpoint may have, and their names in messages."""
    titles = {"theta": "weights", "moments": "optimizer moments"}
    for part in STEP_PARTS:
        titles |= part.titles
    return titles


class StatePart(StepPart):
    """Arrays of a trainer's state, and how a step uses and changes them.

    Attributes:
      name: the name of the part in the state.
      split_as: the kind of tensor as which its arrays are split over devices; None for none.
      is_evaluated: whether the model is evaluated and decoded with its arrays.
      is_measured: whether layers read its arrays, and measure them; see `gradients.Measured`.
    """

    name: ClassVar[str]
    split_as: ClassVar[str | None] = None
    is_evaluated: ClassVar[bool] = False
    is_measured: ClassVar[bool] = False

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

    def after(self, own: NestedMap, update: Update, theta: NestedMap) -> NestedMap:
        """Returns the part after a step, whose update has led to the weights `theta`."""
        del theta
        state = update.verdicts[self.name].state
        assert state is not None, f"{type(self).__name__} defines no state after a step"
        pairs = zip(own.flatten(), state.flatten(), strict=True)
        return own.pack(tf.where(update.stopped, *pair) for pair in pairs)

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

    def to_weights(self, own: NestedMap) -> NestedMap:
        """Returns the weights to evaluate with, in their own dtypes, if the part `is_evaluated`."""
        return own
