"""Local updates: workers that train alone for a while, and what is made of their weights then."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.optim.momentum import Momentum

# The axis of the mesh over which workers stand, and the parts of their runtime's state.
AXIS = "worker"
WORKERS, OUTER = "workers", "outer"

_HERE = "trainer.local_updates"


class LocalUpdates(Configurable):
    """The rule by which the weights of all workers become one again, every `every` steps.

    Between two such steps a worker trains by itself, from the same weights w as all others, on its
    own rows, with its own optimizer. Then the mean of what the workers have moved by is taken for a
    gradient of w, and an outer optimizer moves w by it:

        gradient = w - mean of the workers' weights
        m = momentum m + gradient;  w -= learning_rate m

    with `nesterov` by gradient + momentum m in place of m. As it stands, learning_rate 1 without
    momentum, w becomes the mean: federated averaging (McMahan et al. 2017, arXiv 1602.05629,
    algorithm 1, of clients with equally many examples). Adam within and Nesterov's momentum 0.9
    with learning rate 0.7 without are DiLoCo's (Douillard et al. 2023, arXiv 2311.08105, algorithm
    1 and section 3), which trains 500 steps between.

    Weights with an update rule of their own, such as routers' biases, become the mean.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("every", 0, "Steps that workers train alone; 0: there are no workers.")
        p.define("learning_rate", 1.0, "Learning rate of the outer optimizer.")
        p.define("momentum", 0.0, "What is left of the outer optimizer's moment; 0: it has none.")
        p.define("nesterov", False, "Whether the weights move ahead of the moment.")
        return p

    def __init__(self, params: Params):
        """Raises ValueError naming the Params for what means nothing."""
        super().__init__(params)
        p = params
        if p.every < 0:
            raise ValueError(f"{_HERE}.every is {p.every}; 1 or more expected, or 0 for no workers")
        if not 0.0 < p.learning_rate < math.inf:
            raise ValueError(f"{_HERE}.learning_rate is {p.learning_rate}; more than 0 expected")
        if not 0.0 <= p.momentum < 1.0:
            raise ValueError(f"{_HERE}.momentum is {p.momentum}; it must be in [0, 1)")
        if p.nesterov and not p.momentum:
            raise ValueError(f"{_HERE}.nesterov needs {_HERE}.momentum, which is 0")
        outer = Momentum.params().set(beta=p.momentum, nesterov=p.nesterov)
        self._optimizer = outer.instantiate()

    def moment_specs(self, theta: NestedMap) -> NestedMap:
        """Returns the outer optimizer's VariableSpec tree, of the weights' specs."""
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
        """Returns (theta, moments) after the workers have met.

        theta: the weights that they began with; means: those they have now, averaged, in float32.
        stopped: a bool scalar; where it is true, theta and moments come back as they were.
        """
        pairs = zip(theta.flatten(), means.flatten(), strict=True)
        gradients = theta.pack(tf.cast(weight, tf.float32) - mean for weight, mean in pairs)
        rate = tf.constant(self.p.learning_rate, tf.float32)
        averaged = specs.transform(_averaged)
        return self._optimizer.update(averaged, theta, gradients, moments, step, rate, stopped)


def _averaged(spec: VariableSpec) -> VariableSpec:
    """A weight with a rule of its own, whose rule is to become the mean."""
    if not spec.update_rule:
        return spec
    return dataclasses.replace(spec, update_rule=lambda weight, gradient: weight - gradient)
