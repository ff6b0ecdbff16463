"""Trainer: a training step as a pure function of the state and a batch.

Nothing here depends on devices. A runtime traces these functions, holds the state and feeds them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec, stop_frozen
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.sharding.partitioning import MASTERS
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step import (
    averages,
    histories,
    micro_batches,
    offload,
    precision,
    update_ratios,
)
from lingvo_gshard.training.step import spikes as spikes
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.local_updates import LocalUpdates
from lingvo_gshard.training.step.micro_batches import TensorBatch
from lingvo_gshard.training.step.precision import Fp8, LossScale
from lingvo_gshard.training.step.schedules import InverseSquareRoot
from lingvo_gshard.training.step.update_ratios import Clipping, UpdateRatios

# The parts of a state whose tensors are split over devices.
SHARDED_PARTS = ("theta", "moments", averages.PART)


class Trainer(Configurable):
    """The initial state, the training step and the evaluation step of one task.

    The state is a NestedMap with these parts:

        step        int32, the number of steps taken
        stopped     bool, whether a loss or gradient that was not finite has ended the training
        theta       the weights
        moments     the moments of the optimizer
        averages    averages of the weights, with `average_decay`
        loss_scale  the scale of the loss, with a precision that needs one
        histories   what delayed scales are made of
        spikes      running statistics of loss and gradient norm, with a policy for spikes

    Once `stopped` is true, no step changes the state. Metrics are read some steps late, and the
    state that led to the bad step must still be there to diagnose it. With a loss scale, a step
    that is not finite is skipped: it counts, but changes neither weights nor moments nor averages.
    It ends the training only if the scale cannot become smaller. A spike is skipped in the same
    way by the policies "skip" and "roll_back".
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "seed", 1, "Seed of the weights, of dropout and routing, and of the input.", minimum=0
        )
        p.define("optimizer", Adafactor.params(), "Params of the optimizer.")
        p.define("schedule", InverseSquareRoot.params(), "Params of the learning-rate schedule.")
        parts = "Number of parts of a batch that are computed in sequence."
        p.define("micro_batches", 1, parts, minimum=1)
        p.define(
            "reduce_dtype",
            "float32",
            "Type in which devices add up gradients that are summed over micro-batches: "
            f"{' or '.join(micro_batches.REDUCE_DTYPES)}.",
        )
        p.define("local_updates", LocalUpdates.params(), "How workers train alone and synchronize.")
        p.define(
            "precision",
            "float32",
            f"Types of weights and activations: {', '.join(precision.PRECISIONS)}.",
            changes_results=False,
        )
        p.define("fp8", Fp8.params(), "How precision fp8 rounds products.", changes_results=False)
        scaling = "How the loss is scaled, with float16."
        p.define("loss_scale", LossScale.params(), scaling, changes_results=False)
        p.define(
            "spikes",
            spikes.Spikes.params(),
            "How spikes of loss and gradient are handled.",
            changes_results=False,
        )
        p.define(
            "average_decay",
            0.0,
            "Decay of the averages of the weights; 0 keeps none.",
            minimum=0,
            below=1,
            changes_results=False,
        )
        p.define(
            "clip_norm", 0.0, "Largest global norm of the gradient; 0 disables clipping.", minimum=0
        )
        p.define(
            "update_ratios_every",
            0,
            "Steps between update-to-weight ratios; 0: none.",
            minimum=0,
            changes_results=False,
        )
        p.define(
            "offload_moments",
            False,
            "Whether the optimizer's moments stay in host memory between updates.",
            changes_results=False,
        )
        return p

    def __init__(self, params: Params, task: Task | Params, steps: int = 1000):
        """Makes the trainer of a task.

        Args:
          params: the trainer's Params.
          task: a task with the dtypes of `precision`, or the Params of a task. The trainer
            instantiates Params with these dtypes.
          steps: number of steps of the run, `run.steps`. A learning rate may decay until then.

        Raises:
          UserError: a hyperparameter is out of range, or the task has other dtypes.
        """
        super().__init__(params)
        micro_batches.check_reduce_dtype(params.reduce_dtype)
        dtypes = precision.get(params.precision).with_fp8(params.fp8)
        self.task: Task = dtypes.typed(task).instantiate() if isinstance(task, Params) else task
        dtypes.check(self.task)
        self.precision = dtypes
        self.steps = steps
        self.loss_scale = params.loss_scale.instantiate() if dtypes.scales_loss else None
        self.spikes = spikes.from_params(params.spikes)
        self.local_updates = params.local_updates.instantiate()
        self.optimizer = params.optimizer.instantiate()
        self.schedule = params.schedule.cls.for_run(params.schedule, steps).instantiate()
        specs = self.task.variable_specs()
        self._histories = self._make_histories()
        self.optimizer.check(specs)
        self._frozen = frozen = self.optimizer.frozen(specs)
        # An outer optimizer of local updates leaves frozen weights alone, too.
        self.theta_specs = specs.transform(
            lambda spec: dataclasses.replace(spec, is_frozen=spec.path in frozen)
        )
        # The weights, and their histories if there are any, as layers read them in a step.
        self._pass_specs = self._with_histories(
            self.theta_specs, self._histories and self._histories.specs
        )
        if params.offload_moments and params.update_ratios_every:
            raise UserError(
                f"step.update_ratios_every is {params.update_ratios_every}, but update-to-weight "
                "ratios need all moments on the device, which step.offload_moments keeps in host "
                "memory. Set step.update_ratios_every = 0 or step.offload_moments = False"
            )
        self._ratios = UpdateRatios(params.update_ratios_every, self.optimizer, self.theta_specs)

    def _make_histories(self) -> histories.Histories | None:
        """Returns what delayed scales are made of, if the Params choose them."""
        if not self.p.fp8.delayed_scales:
            return None
        if self.p.local_updates.every:
            raise UserError(
                "step.fp8.delayed_scales is True, but step.local_updates.every is "
                f"{self.p.local_updates.every}: workers have no histories of their own. Set one of "
                "them to its default"
            )
        return histories.Histories(self.task)

    @property
    def evaluated_part(self) -> str:
        """The part of the state that is evaluated and decoded with: `averages` or `theta`."""
        return averages.PART if self.p.average_decay else "theta"

    def evaluated_theta(self, part: NestedMap) -> NestedMap:
        """Returns weights, in their own dtypes, from the state's `evaluated_part`."""
        return averages.to_weights(self.theta_specs, part) if self.p.average_decay else part

    @property
    def sharded_parts(self) -> dict[str, str]:
        """The sharded parts of the state, and the kind of tensor that each is split as."""
        weights = MASTERS if self.precision.has_master_weights else "weights"
        return dict(zip(SHARDED_PARTS, (weights, "moments", "moments"), strict=True))

    def layer_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights that layers compute with, made of the state's weights."""
        return self.precision.layer_weights(self.theta_specs, theta)

    @property
    def gathers_ahead(self) -> bool:
        """Whether loops over layers gather weights one layer ahead; see `context.Context`.

        With several micro-batches they do not, since each would gather all weights again.
        """
        return self.precision.has_master_weights and self.p.micro_batches == 1

    def state_specs(self) -> NestedMap:
        """Returns the state's tree of VariableSpec."""
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
            specs[precision.PART] = self.loss_scale.specs()
        if self.spikes:
            specs[spikes.PART] = self.spikes.specs()
        if self._histories:
            specs[histories.PART] = self._histories.specs
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
        parts = NestedMap()
        if self.p.average_decay:
            parts[averages.PART] = averages.begin(theta)
        if self.loss_scale:
            parts[precision.PART] = self.loss_scale.begin()
        if self.spikes:
            parts[spikes.PART] = self.spikes.begin()
        if self._histories:
            parts[histories.PART] = self._histories.begin()
        return parts

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Returns whether the step with these metrics ended the training, as `stopped` says."""
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]):
            return False
        return not self.loss_scale or self.loss_scale.is_minimal(metrics["loss_scale"])

    def train_step(self, state: NestedMap, batch: TensorBatch) -> tuple[NestedMap, NestedMap]:
        """Returns the state after one step, and the step's metrics, name -> float32 scalar.

        Random numbers depend on the seed, the step and each layer's path.
        """
        return self.apply(state, *self.step_gradients(state, batch))

    def step_gradients(
        self,
        state: NestedMap,
        batch: TensorBatch,
        on_result: context.ResultObserver | None = None,
    ) -> micro_batches.Result:
        """Returns the loss, the metrics and the gradients of the next step.

        Those of histories, if there are any, are the entry `histories.PART` of the gradients.

        Args:
          state: the state before the step.
          batch: feature name -> tensor.
          on_result: called with each layer's results, as in `context.Context`.
        """
        key = tf.stack([tf.constant(self.p.seed & 0x7FFFFFFF, tf.int32), state.step + 1])
        scale = state.loss_scale.scale if self.loss_scale else None
        return self.gradients(
            state.theta,
            batch,
            key,
            scale=scale,
            on_result=on_result,
            own_histories=state.get(histories.PART),
        )

    def apply(
        self,
        state: NestedMap,
        loss: tf.Tensor,
        metrics: dict[str, context.Metric],
        gradients: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns the state after a step, and the step's metrics; see `train_step`.

        Args:
          state: the state before the step.
          loss: the training loss.
          metrics: name -> (value, weight).
          gradients: the gradients, from `step_gradients`.
        """
        gradients = NestedMap(gradients)
        measured = gradients.pop(histories.PART, None) if self._histories else None
        scale = state.loss_scale.scale if self.loss_scale else None
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            specs = self.theta_specs
            norm = update_ratios.global_norm(
                gradients, [*map(self.optimizer.moves, specs.flatten())]
            )
            learning_rate = self.schedule(state.step)

            clipped = Clipping(gradients, specs, norm, self.p.clip_norm)
        values = NestedMap(loss=loss, gradient_norm=norm, learning_rate=learning_rate)
        values.update({name: value for name, (value, _) in metrics.items() if name != "loss"})
        finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)
        verdict = self.spikes.judge(state.spikes, loss, norm, finite) if self.spikes else None
        new_state, ratios, is_skipped = self._next_state(
            state, clipped, learning_rate, finite, verdict
        )
        if self._histories and measured:
            own = self._histories.updated(state.histories, measured, is_skipped)
            new_state[histories.PART] = own
        values.update(ratios)
        if verdict:
            values.update(verdict.metrics)
        if self.loss_scale:
            values.update(loss_scale=scale, skipped_steps=new_state.loss_scale.skipped_steps)
        return new_state, values.transform(lambda value: tf.cast(value, tf.float32))

    def _next_state(
        self,
        state: NestedMap,
        clipped: Clipping,
        learning_rate: tf.Tensor,
        finite: tf.Tensor,
        verdict: spikes.Verdict | None,
    ) -> tuple[NestedMap, dict[str, tf.Tensor], tf.Tensor]:
        """Returns the state after a step, update-to-weight ratios, and whether it is skipped.

        Args:
          state: the state before the step.
          clipped: the gradients and how they are clipped.
          learning_rate: the step's learning rate.
          finite: whether the step's loss and gradient are finite.
          verdict: what is known of spikes.
        """
        goes_on, updates = finite, state.step
        if self.loss_scale:
            goes_on |= tf.logical_not(self.loss_scale.is_minimal(state.loss_scale.scale))
            updates -= state.loss_scale.skipped_steps
        stopped = state.stopped | tf.logical_not(goes_on)
        is_skipped = stopped | tf.logical_not(finite) if self.loss_scale else stopped
        if verdict:
            is_skipped |= verdict.is_skipped
            updates -= state.spikes.skipped
        theta, moments = self._updated(state, clipped, updates, learning_rate, is_skipped)
        step = tf.where(stopped, state.step, state.step + 1)
        new_state = NestedMap(step=step, stopped=stopped, theta=theta, moments=moments)
        if self.p.average_decay:
            new_state[averages.PART] = self._next_averages(state, theta, updates, is_skipped)
        if self.loss_scale:
            new = self.loss_scale.update(state.loss_scale, finite)
            new_state[precision.PART] = _unless(stopped, state.loss_scale, new)
        if verdict:
            new_state[spikes.PART] = _unless(stopped, state.spikes, verdict.state)
        ratios = self._ratios.metrics(new_state, clipped, updates, learning_rate, is_skipped)
        return new_state, ratios, is_skipped

    def _updated(
        self,
        state: NestedMap,
        clipped: Clipping,
        updates: tf.Tensor,
        learning_rate: tf.Tensor,
        is_skipped: tf.Tensor,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns the weights and the moments after a step."""
        specs, rest = self.theta_specs, (updates, learning_rate, is_skipped)
        if self.p.offload_moments:
            return offload.update(self.optimizer, specs, state, clipped, *rest)
        return self.optimizer.update(specs, state.theta, clipped(), state.moments, *rest)

    @property
    def offload_settings(self) -> list[str]:
        """The Params that keep arrays in host memory, such as `step.offload_moments = True`."""
        found = ["step.offload_moments = True"] if self.p.offload_moments else []
        for layer in self.task.all_layers():
            if isinstance(layer, Execution) and remat_policy.is_offloaded(layer.p.rematerialize):
                found.append(f"{layer.path}.rematerialize = {layer.p.rematerialize!r}")
        return found

    def is_on_host(self, part: str, spec: VariableSpec) -> bool:
        """Returns whether an array of the state is kept in host memory.

        Args:
          part: the part of the state, such as "moments".
          spec: the array's spec.
        """
        return part == "moments" and self.p.offload_moments and offload.is_offloaded(spec)

    def _next_averages(
        self, state: NestedMap, theta: NestedMap, updates: tf.Tensor, is_skipped: tf.Tensor
    ) -> NestedMap:
        return averages.update(
            self.theta_specs,
            state.averages,
            theta,
            updates,
            self.p.average_decay,
            is_skipped,
        )

    def gradients(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        key: tf.Tensor,
        on_output: Callable[[str, tf.Tensor], None] | None = None,
        scale: tf.Tensor | None = None,
        on_result: context.ResultObserver | None = None,
        own_histories: NestedMap | None = None,
    ) -> micro_batches.Result:
        """Returns the training loss, the metrics and the gradients of the weights.

        Those of frozen weights are not computed, and are 0. Those of histories that are given are
        the entry `histories.PART`.

        Args:
          theta: the weights.
          batch: feature name -> tensor.
          key: int32 [2], seeds the random numbers.
          on_output: called with each layer's output in forward order, as in `context.scope`.
          scale: a float32 scalar that multiplies the loss in the backward pass. The returned
            gradients are divided by it.
          on_result: called with the results of each layer, as in `context.Context`.
          own_histories: the histories of the state; by default those before the first step.
        """
        own = self._histories and (own_histories or self._histories.begin())
        ahead = self.gathers_ahead
        weights = self.precision.layer_weights(self.theta_specs, theta, gathers_ahead=ahead)
        weights = self._with_histories(weights, own)

        passing = dataclasses.replace(
            self.training_context(key),
            on_output=on_output,
            on_result=on_result,
            has_histories=own is not None,
            gathers_ahead=ahead,
        )
        compute = self._gradients_of_part if self.p.micro_batches == 1 else self._gradients_of_parts
        loss, metrics, gradients = compute(weights, batch, passing, scale)
        found = iter(gradients.flatten())
        pairs = zip(self._pass_specs.flatten(), weights.flatten(), strict=True)
        complete = [
            tf.zeros(w.shape, s.dtype) if s.path in self._frozen else next(found) for s, w in pairs
        ]
        if self._histories is None:
            return loss, metrics, theta.pack(complete)
        gradients, measured = self._histories.parted(theta, complete)
        if own_histories is not None:
            gradients[histories.PART] = measured
        return loss, metrics, gradients

    def _with_histories(self, theta: NestedMap, own: NestedMap | None) -> NestedMap:
        """Returns a tree like the weights, joined with one like the histories if there are any."""
        return self._histories.joined(theta, own) if self._histories and own else theta

    def training_context(self, key: tf.Tensor) -> context.Context:
        """Returns the context of one forward pass of a training step.

        Args:
          key: int32 [2], seeds the random numbers.
        """
        return context.Context(True, key, extensions=self.precision.extensions, frozen=self._frozen)

    def _trained(self, tree: NestedMap) -> NestedMap:
        """Returns the leaves of a tree like `_pass_specs` that are not frozen, in their order."""
        pairs = zip(self._pass_specs.flatten(), tree.flatten(), strict=True)
        return NestedMap(leaves=[leaf for spec, leaf in pairs if spec.path not in self._frozen])

    def _gradients_of_part(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        passing: context.Context,
        scale: tf.Tensor | None,
    ) -> micro_batches.Result:
        trained = self._trained(theta)
        with context.use(passing) as scope, tf.GradientTape() as tape:
            tape.watch(trained.flatten())
            weights = stop_frozen(self._pass_specs.flatten(), theta.flatten())
            loss, metrics = self.task.loss(theta.pack(weights), batch)
            loss = micro_batches.share_of_loss(loss, metrics, scope)
        flat = tape.gradient(
            loss,
            trained.flatten(),
            output_gradients=cast(Any, scale),  # The stubs want a list, also of one loss.
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = trained.pack(tf.convert_to_tensor(g) for g in flat)
        if scale is not None:
            gradients = gradients.transform(lambda g: tf.cast(g, tf.float32) / scale)
        return loss, {**metrics, **scope.metrics}, gradients

    def _gradients_of_parts(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        passing: context.Context,
        scale: tf.Tensor | None,
    ) -> micro_batches.Result:
        """Returns what `_gradients_of_part` does for a whole batch, computed in parts."""

        def compute(
            part: TensorBatch, key: tf.Tensor, weights: micro_batches.LossWeights
        ) -> micro_batches.Result:
            now = dataclasses.replace(passing.part(), seed=key, batch_weights=weights)
            return self._gradients_of_part(theta, part, now, scale)

        def weigh(part: TensorBatch, key: tf.Tensor) -> micro_batches.LossWeights:
            unobserved = dataclasses.replace(
                passing.part(), seed=key, on_output=None, on_result=None
            )
            with context.use(unobserved) as now:
                return micro_batches.loss_weights(now, self.task.loss(theta, part)[1])

        assert passing.seed is not None
        return micro_batches.accumulate(
            compute,
            weigh,
            batch,
            passing.seed,
            self.p.micro_batches,
            self._trained(self._pass_specs),
            self.p.reduce_dtype,
        )

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


def _unless(stopped: tf.Tensor, old: NestedMap, new: NestedMap) -> NestedMap:
    pairs = zip(old.flatten(), new.flatten(), strict=True)
    return new.pack(tf.where(stopped, *pair) for pair in pairs)
