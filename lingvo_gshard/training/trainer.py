"""The training step as functions: state and batch in, new state and metrics out.

Nothing here knows where it runs. A runtime traces these functions, keeps the state and feeds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training import averages, loss_scale, micro_batches, precision
from lingvo_gshard.training.local_updates import LocalUpdates
from lingvo_gshard.training.loss_scale import LossScale
from lingvo_gshard.training.micro_batches import TensorBatch
from lingvo_gshard.training.optim import optimizer
from lingvo_gshard.training.optim.adafactor import Adafactor
from lingvo_gshard.training.optim.schedules import InverseSquareRoot


class Trainer(Configurable):
    """`init_state`, `train_step` and `eval_step` of one task under one optimizer.

    The state is NestedMap(step, stopped, theta, moments): the int32 number of steps taken, whether
    a loss or gradient was not finite (bool), the weights, and the optimizer's moments. From the
    step that was not finite on, theta, moments and step stay as they were, so that whoever reads
    the metrics a little later still finds the state that led to it.

    With `average_decay` there are `averages` of the weights, too. Where the loss is scaled there is
    `loss_scale`, and a step that is not finite is skipped: it counts, but the weights, moments and
    averages stay as they were. Only one with the least scale stops the training.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("steps", 1000, "Steps to train in all.")
        p.define("seed", 1, "Seed of weights, dropout, routing and the input's order.")
        p.define("optimizer", Adafactor.params(), "Params of the optimizer.")
        p.define("schedule", InverseSquareRoot.params(), "Params of the learning-rate schedule.")
        p.define(
            "micro_batches", 1, "In how many parts, one after another, a step computes its batch."
        )
        p.define(
            "local_updates",
            LocalUpdates.params(),
            "How the workers of a mesh train alone and meet.",
        )
        p.define(
            "precision",
            "float32",
            f"Types of weights and activations: {', '.join(precision.PRECISIONS)}.",
        )
        p.define("loss_scale", LossScale.params(), "With float16: how the loss is scaled.")
        p.define("average_decay", 0.0, "How slowly averages of the weights forget; 0: none kept.")
        p.define("clip_norm", 0.0, "Largest global norm of the gradient; 0: not clipped.")
        p.define("log_every_steps", 50, "Steps between log lines and between curve points.")
        p.define("checkpoint_every_steps", 1000, "Steps between checkpoints; 0: only at the end.")
        p.define("keep_checkpoints", 3, "How many checkpoints are kept.")
        p.define("evaluate_every_steps", 0, "Steps between dev losses; 0: only at the end.")
        return p

    def __init__(self, params: Params, task: Task | Params):
        """task: of the types that `precision` means; its Params get these here.

        Raises ValueError, naming the Params, if its types are others.
        """
        super().__init__(params)
        _check(params)
        types = precision.get(params.precision)
        if isinstance(task, Params):
            task = types.typed(task).instantiate()
        types.check(task)
        self.task = task
        self.loss_scale = params.loss_scale.instantiate() if types.scales_loss else None
        self.local_updates = params.local_updates.instantiate()
        self.optimizer = params.optimizer.instantiate()
        schedule = params.schedule.copy()
        if "total_steps" in schedule and not schedule.total_steps:
            schedule.total_steps = params.steps
        self.schedule = schedule.instantiate()
        self.theta_specs = task.variable_specs()
        self.optimizer.check(self.theta_specs)

    @property
    def evaluated(self) -> str:
        """The part of the state that is evaluated and decoded with: averages if there are any."""
        return averages.PART if self.p.average_decay else "theta"

    def weights_to_evaluate(self, part: NestedMap) -> NestedMap:
        """Returns theta, in the weights' types, made of the part of the state `evaluated` names."""
        return averages.to_weights(self.theta_specs, part) if self.p.average_decay else part

    def state_specs(self) -> NestedMap:
        """Returns the state's VariableSpec tree: path, layout, shape and type of every tensor."""
        zero = constant(0)
        specs = NestedMap(
            step=VariableSpec("step", "", (), "int32", zero),
            stopped=VariableSpec("stopped", "", (), "bool", zero),
            theta=self.theta_specs,
            moments=self.optimizer.moment_specs(self.theta_specs),
        )
        if self.p.average_decay:
            specs[averages.PART] = averages.specs(self.theta_specs)
        if self.loss_scale:
            specs[loss_scale.PART] = self.loss_scale.specs()
        return specs

    def init_state(self) -> NestedMap:
        """Returns the state before the first step, a function of `seed` alone."""
        seed = tf.constant([self.p.seed & 0x7FFFFFFF, 0], tf.int32)
        specs = self.state_specs()
        state = NestedMap(
            step=tf.zeros([], tf.int32),
            stopped=tf.zeros([], tf.bool),
            theta=specs.theta.transform(lambda spec: spec.init(seed)),
            moments=specs.moments.transform(lambda spec: spec.init(seed)),
        )
        state.update(self.beside_weights(state.theta))
        return state

    def beside_weights(self, theta: NestedMap) -> NestedMap:
        """Returns what the state has beside weights and moments as it begins with these weights."""
        parts = NestedMap()
        if self.p.average_decay:
            parts[averages.PART] = averages.begin(theta)
        if self.loss_scale:
            parts[loss_scale.PART] = self.loss_scale.begin()
        return parts

    def stops(self, metrics: dict[str, float]) -> bool:
        """Returns whether a step of these metrics stopped the training; the state says so, too."""
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]):
            return False
        return not self.loss_scale or self.loss_scale.cannot_back_off(metrics["loss_scale"])

    def train_step(self, state: NestedMap, batch: TensorBatch) -> tuple[NestedMap, NestedMap]:
        """Returns the state after one step and its metrics, name -> float32 scalar.

        Random numbers come from (seed, step) and each layer's path.
        """
        key = tf.stack([tf.constant(self.p.seed & 0x7FFFFFFF, tf.int32), state.step + 1])
        scale = state.loss_scale.scale if self.loss_scale else None
        loss, metrics, gradients = self.gradients(state.theta, batch, key, scale=scale)
        with tf.name_scope(f"{optimizer.SCOPE}/"):
            norm = self._norm(gradients)
            learning_rate = self.schedule(state.step)
            gradients = self._scaled(gradients, _clip_scale(norm, self.p.clip_norm))
        values = NestedMap(loss=loss, gradient_norm=norm, learning_rate=learning_rate)
        values.update({name: value for name, (value, _) in metrics.items() if name != "loss"})
        finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)
        new_state = self._next_state(state, gradients, learning_rate, finite)
        if self.loss_scale:
            values.update(loss_scale=scale, skipped_steps=new_state.loss_scale.skipped_steps)
        return new_state, values.transform(lambda value: tf.cast(value, tf.float32))

    def _next_state(
        self, state: NestedMap, gradients: NestedMap, learning_rate: tf.Tensor, finite: tf.Tensor
    ) -> NestedMap:
        """The state after a step with these gradients, which are finite or not."""
        goes_on, updates = finite, state.step
        if self.loss_scale:
            goes_on |= ~self.loss_scale.cannot_back_off(state.loss_scale.scale)
            updates -= state.loss_scale.skipped_steps
        stopped = state.stopped | ~goes_on
        held = stopped | ~finite if self.loss_scale else stopped
        theta, moments = self.optimizer.update(
            self.theta_specs, state.theta, gradients, state.moments, updates, learning_rate, held
        )
        step = tf.where(stopped, state.step, state.step + 1)
        new_state = NestedMap(step=step, stopped=stopped, theta=theta, moments=moments)
        if self.p.average_decay:
            new_state[averages.PART] = averages.update(
                self.theta_specs,
                state.averages,
                theta,
                updates,
                self.p.average_decay,
                lambda old, new: tf.where(held, old, new),
            )
        if self.loss_scale:
            moved = self.loss_scale.update(state.loss_scale, finite)
            pairs = zip(state.loss_scale.flatten(), moved.flatten(), strict=True)
            new_state[loss_scale.PART] = moved.pack(tf.where(stopped, *pair) for pair in pairs)
        return new_state

    def _norm(self, gradients: NestedMap) -> tf.Tensor:
        """The global norm, of the weights that the optimizer moves."""
        pairs = zip(self.theta_specs.flatten(), gradients.flatten(), strict=True)
        return tf.sqrt(
            tf.add_n([_sum_of_squares(g) for spec, g in pairs if self.optimizer.moves(spec)])
        )

    def _scaled(self, gradients: NestedMap, scale: tf.Tensor) -> NestedMap:
        pairs = zip(self.theta_specs.flatten(), gradients.flatten(), strict=True)
        return gradients.pack(
            tf.cast(g, tf.float32) * (1.0 if spec.update_rule else scale) for spec, g in pairs
        )

    def gradients(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        key: tf.Tensor,
        on_output: Callable[[str, tf.Tensor], None] | None = None,
        scale: tf.Tensor | None = None,
    ) -> micro_batches.Result:
        """Returns the training loss, the metrics and the gradients of theta under an int32 [2] key.

        on_output: sees the layers' outputs in forward order, as in `context.scope`.
        scale: a float32 scalar; the backward pass is that of the loss times it, what is returned
        is not.
        """

        def compute(part: TensorBatch, key: tf.Tensor) -> micro_batches.Result:
            return self._gradients_of_part(theta, part, key, on_output, scale)

        if self.p.micro_batches == 1:
            return compute(batch, key)
        return micro_batches.accumulate(compute, batch, key, self.p.micro_batches, self.theta_specs)

    def _gradients_of_part(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        key: tf.Tensor,
        on_output: Callable[[str, tf.Tensor], None] | None,
        scale: tf.Tensor | None,
    ) -> micro_batches.Result:
        scoped = context.scope(training=True, seed=key, on_output=on_output)
        with scoped as scope, tf.GradientTape() as tape:
            tape.watch(theta.flatten())
            loss, metrics = self.task.loss(theta, batch)
        flat = tape.gradient(
            loss,
            theta.flatten(),
            output_gradients=scale,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = theta.pack(tf.convert_to_tensor(g) for g in flat)
        if scale is not None:
            gradients = gradients.transform(lambda g: tf.cast(g, tf.float32) / scale)
        return loss, {**metrics, **scope.metrics}, gradients

    def eval_step(self, theta: NestedMap, batch: TensorBatch) -> NestedMap:
        """Returns the metrics of one batch without training, name -> (value, weight)."""
        with context.scope(training=False) as scope:
            loss, metrics = self.task.loss(theta, batch)
        metrics = {"loss": (loss, metrics.get("tokens", (1.0,))[0]), **metrics, **scope.metrics}
        return NestedMap(
            {
                name: (tf.cast(value, tf.float32), tf.cast(weight, tf.float32))
                for name, (value, weight) in metrics.items()
            }
        )


def _sum_of_squares(gradient: tf.Tensor) -> tf.Tensor:
    """By rows first, and those as means: XLA makes one sum of two, by a slower way on a CPU."""
    squares = tf.square(tf.cast(gradient, tf.float32))
    if squares.shape.rank < 2:
        return tf.reduce_sum(squares)
    return tf.reduce_sum(tf.reduce_mean(squares, -1)) * squares.shape[-1]


def _clip_scale(norm: tf.Tensor, clip_norm: float) -> tf.Tensor:
    """The factor that brings the gradient's norm down to clip_norm (arXiv 1211.5063, 3.2)."""
    if not clip_norm:
        return tf.constant(1.0)
    return clip_norm / tf.maximum(norm, clip_norm)


def _check(params: Params) -> None:
    at_least = {
        "steps": 1,
        "micro_batches": 1,
        "clip_norm": 0,
        "log_every_steps": 1,
        "checkpoint_every_steps": 0,
        "keep_checkpoints": 1,
        "evaluate_every_steps": 0,
    }
    for name, least in at_least.items():
        if params.get(name) < least:
            raise ValueError(f"trainer.{name} is {params.get(name)}; {least} or more expected")
    if not 0 <= params.average_decay < 1:
        raise ValueError(
            f"trainer.average_decay is {params.average_decay}; it must be in [0, 1), 0 for none"
        )
