"""Trainer: a training step as a pure function of the state and a batch.

Nothing here depends on devices. A runtime traces these functions, holds the state and feeds them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from lingvo_gshard.core import context, tf
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.sharding.partitioning import MASTERS
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step import precision, state_part
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.clipping import Clipping, global_norm
from lingvo_gshard.training.step.gradients import Gradients, LossAndGradients, TensorBatch
from lingvo_gshard.training.step.schedules import InverseSquareRoot


class Trainer(Configurable):
    """The initial state, the training step and the evaluation step of one task.

    The state is a NestedMap with these parts:

        step        int32, the number of steps taken
        stopped     bool, whether a loss or gradient that was not finite has ended the training
        theta       the weights
        moments     the moments of the optimizer
        averages    averages of the weights, with `average_decay`
        loss_scale  the scale of the loss, with a precision that needs one
        spikes      running statistics of loss and gradient norm, with a policy for spikes
        ...         what other parts keep

    Once `stopped` is true, no step changes the state. Metrics are read some steps late, and the
    state that led to the bad step must still be there to diagnose it. With a loss scale, a step
    that is not finite is skipped: it counts, but changes neither weights nor moments nor averages.
    It ends the training only if the scale cannot become smaller. A spike is skipped in the same
    way by the policies "skip" and "roll_back".
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("seed", 1, "Seed of weights, dropout, routing and the input.", minimum=0)
        p.define("optimizer", Adafactor.params(), "Params of the optimizer.")
        p.define("schedule", InverseSquareRoot.params(), "Params of the learning-rate schedule.")
        p.define(
            "precision",
            "float32",
            f"Types of weights and activations: {', '.join(precision.precision_names())}.",
            changes_results=False,
        )
        p.define("clip_norm", 0.0, "Largest global norm of the gradient; 0: no limit.", minimum=0)
        for part in state_part.STEP_PARTS:
            part.define(p)
        return p

    def __init__(self, params: Params, task: Task | Params, steps: int = 1000):
        """Makes the trainer of a task.

        Args:
          task: a task with the dtypes of `precision`, or the Params of a task. The trainer
            instantiates Params with these dtypes.
          steps: number of steps of the run, `run.steps`. A learning rate may decay until then.

        Raises:
          UserError: a hyperparameter is out of range, or the task has other dtypes.
        """
        super().__init__(params)
        dtypes = precision.get(params.precision)
        for part in state_part.STEP_PARTS:
            dtypes = part.choose_precision(params, dtypes)
        self.task: Task = dtypes.typed(task).instantiate() if isinstance(task, Params) else task
        dtypes.check(self.task)
        self.precision = dtypes
        self.steps = steps
        self.optimizer = params.optimizer.instantiate()
        self.schedule = params.schedule.cls.for_run(params.schedule, steps).instantiate()
        specs = self.task.variable_specs()
        self.optimizer.check(specs)
        frozen = self.optimizer.frozen(specs)
        # An outer optimizer of local updates leaves frozen weights alone, too.
        self.theta_specs = specs.transform(
            lambda spec: dataclasses.replace(spec, is_frozen=spec.path in frozen)
        )
        made = state_part.Ingredients(params, self.task, self.optimizer, self.theta_specs, dtypes)
        found = [part.of(made) for part in state_part.STEP_PARTS]
        self.step_parts: list[state_part.StepPart] = [part for part in found if part]
        self.parts = {
            part.name: part for part in self.step_parts if isinstance(part, state_part.StatePart)
        }
        self.gradients = Gradients(
            self.task,
            dtypes,
            self.theta_specs,
            frozen,
            next((cast(Any, part) for part in self.parts.values() if part.is_measured), None),
            next(filter(None, (part.accumulate for part in self.step_parts)), None),
        )

    def check_device(self, platform: str, name: str, capability: str = "") -> None:
        """Checks that devices compute the step in its precision; see `StepPart`."""
        for part in state_part.STEP_PARTS:
            part.check_device(self.precision, platform, name, capability)

    def device_notes(self, platform: str, has_kernels: bool = True) -> list[str]:
        """Returns sentences on what devices compute in another way; see `StepPart`."""
        given = self.precision, self.task, platform, has_kernels
        return [note for part in state_part.STEP_PARTS for note in part.device_notes(*given)]

    @property
    def evaluated_part(self) -> str:
        """The part of the state that is evaluated and decoded with: `averages` or `theta`."""
        return next((name for name, part in self.parts.items() if part.is_evaluated), "theta")

    def evaluated_theta(self, part: NestedMap) -> NestedMap:
        """Returns weights, in their own dtypes, from the state's `evaluated_part`."""
        evaluated = self.parts.get(self.evaluated_part)
        return evaluated.to_weights(part) if evaluated else part

    @property
    def sharded_parts(self) -> dict[str, str]:
        """The sharded parts of the state, and the kind of tensor that each is split as."""
        weights = MASTERS if self.precision.has_master_weights else "weights"
        split = {name: part.split_as for name, part in self.parts.items() if part.split_as}
        return {"theta": weights, "moments": "moments", **split}

    def layer_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights that layers compute with, made of the state's weights."""
        return self.precision.layer_weights(self.theta_specs, theta)

    def state_specs(self) -> NestedMap:
        """Returns the state's tree of VariableSpec."""
        zero = constant(0)
        specs = NestedMap(
            step=VariableSpec("step", "", (), "int32", zero),
            stopped=VariableSpec("stopped", "", (), "bool", zero),
            theta=self.theta_specs,
            moments=self.optimizer.moment_specs(self.theta_specs),
        )
        specs.update({name: part.specs() for name, part in self.parts.items()})
        return specs

    def init_state(self) -> NestedMap:
        """Returns the state before the first step. It depends on `seed` only."""
        seed = tf.constant([self.p.seed & 0x7FFFFFFF, 0], tf.int32)
        specs = self.state_specs()
        state = NestedMap(
            step=tf.zeros([], tf.int32),
            stopped=tf.zeros([], tf.bool),
            theta=specs.theta.transform(lambda spec: spec.init(seed)),
            moments=specs.moments.transform(lambda spec: spec.init(seed)),
        )
        state.update(self.initial_extras(state.theta))
        return state

    def initial_extras(self, theta: NestedMap) -> NestedMap:
        """Returns the initial optional parts, such as averages, for these weights."""
        return NestedMap({name: part.begin(theta) for name, part in self.parts.items()})

    def shown_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of a step, from 1 on, without values that only other steps have."""
        for part in self.step_parts:
            metrics = part.shown_metrics(step, metrics)
        return metrics

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Returns whether the step with these metrics ended the training, as `stopped` says."""
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]):
            return False
        return not any(part.goes_on(metrics) for part in self.parts.values())

    def train_step(self, state: NestedMap, batch: TensorBatch) -> tuple[NestedMap, NestedMap]:
        """Returns the state after one step, and the step's metrics, name -> float32 scalar.

        Random numbers depend on the seed, the step and each layer's path.
        """
        return self.apply(state, *self.step_gradients(state, batch))

    def step_gradients(
        self, state: NestedMap, batch: TensorBatch, on_result: context.ResultObserver | None = None
    ) -> LossAndGradients:
        """Returns the loss, the metrics and the gradients of the next step.

        What the backward pass measures for a part of the state is an entry of the gradients.

        Args:
          batch: feature name -> tensor.
          on_result: called with each layer's results, as in `context.Context`.
        """
        key = tf.stack([tf.constant(self.p.seed & 0x7FFFFFFF, tf.int32), state.step + 1])
        given: dict[str, Any] = {}
        for name, part in self.parts.items():
            given |= part.before(state[name])
        return self.gradients(state.theta, batch, key, on_result=on_result, **given)

    def apply(
        self,
        state: NestedMap,
        loss: tf.Tensor,
        metrics: dict[str, context.Metric],
        gradients: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns the state after a step, and the step's metrics; see `train_step`.

        Args:
          metrics: name -> (value, weight).
        """
        gradients = NestedMap(gradients)
        measured = {name: gradients.pop(name) for name in self.parts if name in gradients}
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            specs = self.theta_specs
            moves = [*map(self.optimizer.moves, specs.flatten())]
            norm = global_norm(gradients, moves)
            learning_rate = self.schedule(state.step)
            clipped = Clipping(gradients, specs, norm, self.p.clip_norm)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)
        seen = state_part.Seen(loss, norm, finite, measured)
        verdicts = {name: part.judge(state[name], seen) for name, part in self.parts.items()}
        update = self._update(state, clipped, learning_rate, seen, verdicts)
        new_state = self._next_state(update)
        values = NestedMap(loss=loss, gradient_norm=norm, learning_rate=learning_rate)
        values.update({name: value for name, (value, _) in metrics.items() if name != "loss"})
        for part in self.step_parts:
            values.update(part.measure(update, new_state))
        for name, part in self.parts.items():
            values.update(part.metrics(state[name], new_state[name], verdicts[name]))
        return new_state, values.transform(lambda value: tf.cast(value, tf.float32))

    def _update(
        self,
        state: NestedMap,
        clipped: Clipping,
        learning_rate: tf.Tensor,
        seen: state_part.Seen,
        verdicts: dict[str, state_part.Verdict],
    ) -> state_part.Update:
        """Returns the update of a step. A training that stops skips it."""
        goes_on, updates = seen.finite, state.step
        for name, part in self.parts.items():
            goes_on |= verdicts[name].goes_on
            updates -= part.skipped_so_far(state[name])
        stopped = is_skipped = state.stopped | tf.logical_not(goes_on)
        for verdict in verdicts.values():
            is_skipped |= verdict.is_skipped
        facts = state, clipped, seen, verdicts
        return state_part.Update(*facts, updates, learning_rate, is_skipped, stopped)

    def _next_state(self, update: state_part.Update) -> NestedMap:
        state = update.state
        found = [part.update_weights(update) for part in self.step_parts]
        theta, moments = next(filter(None, found), None) or self.optimizer.update(
            self.theta_specs,
            state.theta,
            update.clipped(),
            state.moments,
            update.updates,
            update.learning_rate,
            update.is_skipped,
        )
        step = tf.where(update.stopped, state.step, state.step + 1)
        new_state = NestedMap(step=step, stopped=update.stopped, theta=theta, moments=moments)
        new_state.update(
            {name: part.after(state[name], update, theta) for name, part in self.parts.items()}
        )
        return new_state

    def is_on_host(self, part: str, spec: VariableSpec) -> bool:
        """Returns whether an array of a part, such as "moments", is kept in host memory."""
        return any(each.is_on_host(part, spec) for each in self.step_parts)

    def eval_step(self, theta: NestedMap, batch: TensorBatch) -> NestedMap:
        """Returns the metrics of one batch, name -> (value, weight), without training."""
        with (
            context.scope(training=False) as scope,
            context.override(extensions=self.precision.extensions),
        ):
            loss, metrics = self.task.loss(self.layer_weights(theta), batch)
        metrics = {"loss": (loss, metrics.get("tokens", (1.0,))[0]), **metrics, **scope.metrics}
        return NestedMap(
            {
                name: (tf.cast(value, tf.float32), tf.cast(weight, tf.float32))
                for name, (value, weight) in metrics.items()
            }
        )
