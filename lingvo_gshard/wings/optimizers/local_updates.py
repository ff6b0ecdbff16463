"""Local updates: workers train alone for some steps, and then synchronize their weights."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Configurable, NestedMap, Params, UserError, VariableSpec, tf
from lingvo_gshard.training import STEP_PARTS, Ingredients, StepPart
from lingvo_gshard.wings.optimizers.momentum import Momentum

# The axis of the mesh over the workers, and the parts that they add to the state.
AXIS = "worker"
WORKERS, OUTER = "workers", "outer"

_PARAM = "step.local_updates"


@STEP_PARTS.register("local updates")
class LocalUpdates(Configurable, StepPart):
    """The outer step, which makes the workers' weights equal after every `every` inner steps.

    All workers start from the same weights w. Each takes inner steps on its own rows with its own
    optimizer. The outer step treats the workers' mean change as a gradient of w:

        gradient = w - mean of the workers' weights
        m = momentum m + gradient;  w -= learning_rate m

    With `nesterov` w moves by gradient + momentum m instead of m.

    The default, learning rate 1 without momentum, sets w to the mean. This is federated averaging
    (McMahan et al. 2017, arXiv 1602.05629, algorithm 1, with clients of equal size). DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1 and section 3) takes 500 inner steps of
    AdamW, and outer steps with Nesterov momentum 0.9 and learning rate 0.7.

    Weights with an update rule of their own, such as routers' biases, become the mean.
    """

    titles = {WORKERS: "states of the workers", OUTER: "moments of the outer optimizer"}

    @classmethod
    def define(cls, p: Params) -> None:
        p.define("local_updates", cls.params(), "How workers train alone and synchronize.")

    @classmethod
    def of(cls, made: Ingredients) -> LocalUpdates:
        """Returns the outer step of a trainer, which its runtime takes."""
        return made.params.local_updates.instantiate()

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("every", 0, "Inner steps between two outer steps; 0: no outer steps.", minimum=0)
        p.define("learning_rate", 1.0, "Learning rate of the outer optimizer.", above=0)
        p.define_fraction("momentum", 0.0, "Momentum of the outer optimizer; 0 disables it.")
        p.define("nesterov", False, "Whether the outer optimizer uses Nesterov momentum.")
        return p

    def __init__(self, params: Params):
        """Raises ValueError if the hyperparameters contradict each other."""
        super().__init__(params)
        p = params
        if p.nesterov and not p.momentum:
            raise UserError(f"{_PARAM}.nesterov needs {_PARAM}.momentum, which is 0")
        outer = Momentum.params().set(beta=p.momentum, nesterov=p.nesterov)
        self._optimizer = outer.instantiate()

    def moment_specs(self, theta: NestedMap) -> NestedMap:
        """Returns the tree of VariableSpec of the outer optimizer's moments."""
        return self._optimizer.moment_specs(theta)

    def update(
        self,
        specs: NestedMap,
        theta: NestedMap,
        means: NestedMap,
        moments: NestedMap,
        step: tf.Tensor,
        stopped: tf.Tensor,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns (theta, moments) after an outer step.

        Args:
          theta: the weights after the previous outer step.
          means: the means of the workers' weights, in float32.
          moments: the outer optimizer's moments.
          step: an int32 scalar, the number of inner steps.
          stopped: a bool scalar; if true, theta and moments are returned unchanged.
        """
        pairs = zip(theta.flatten(), means.flatten(), strict=True)
        gradients = theta.pack(tf.cast(weight, tf.float32) - mean for weight, mean in pairs)
        rate = tf.constant(self.p.learning_rate, tf.float32)
        averaged = specs.transform(_averaged)
        return self._optimizer.update(averaged, theta, gradients, moments, step, rate, stopped)


def _averaged(spec: VariableSpec) -> VariableSpec:
    """Returns the weight as the outer optimizer sees it: one rate for all, no update rules."""
    rule = spec.update_rule and (lambda weight, gradient: weight - gradient)
    return dataclasses.replace(spec, update_rule=rule, learning_rate_factor=1.0)
