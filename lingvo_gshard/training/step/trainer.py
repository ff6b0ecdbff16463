"""Trainer: a training step as a pure function of the state and a batch.

Nothing here depends on devices. A runtime traces these functions, holds the state and feeds them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.sharding.partitioning import MASTERS
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step import micro_batches, offload, precision, spikes, update_ratios
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.averages import Averages
from lingvo_gshard.training.step.gradients import Gradients
from lingvo_gshard.training.step.local_updates import LocalUpdates
from lingvo_gshard.training.step.measured import Measured
from lingvo_gshard.training.step.micro_batches import TensorBatch
from lingvo_gshard.training.step.precision import LossScale
from lingvo_gshard.training.step.schedules import InverseSquareRoot
from lingvo_gshard.training.step.state_part import Outcome, Seen, StatePart, Verdict
from lingvo_gshard.training.step.step_feature import STEP_FEATURES, StepFeature
from lingvo_gshard.training.step.update_ratios import Clipping, UpdateRatios

# The parts of a state whose tensors are split over devices.
SHARDED_PARTS = ("theta", "moments", Averages.name)


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
        ...         what each StepFeature keeps

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
            f"Types of weights and activations: {', '.join(precision.precision_names())}.",
            changes_results=False,
        )
        for name, feature in STEP_FEATURES.items():
            p.define(name, feature.params(), feature.HELP, changes_results=False)
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
        self.features: list[StepFeature] = [
            params.get(name).instantiate() for name, _ in STEP_FEATURES.items()
        ]
        dtypes = precision.get(params.precision)
        for feature in self.features:
            dtypes = feature.precision(dtypes)
        self.task: Task = dtypes.typed(task).instantiate() if isinstance(task, Params) else task
        dtypes.check(self.task)
        self.precision = dtypes
        self.steps = steps
        self.local_updates = params.local_updates.instantiate()
        self.optimizer = params.optimizer.instantiate()
        self.schedule = params.schedule.cls.for_run(params.schedule, steps).instantiate()
        specs = self.task.variable_specs()
        added = [feature.part(self.task, params) for feature in self.features]
        self.optimizer.check(specs)
        frozen = self.optimizer.frozen(specs)
        # An outer optimizer of local updates leaves frozen weights alone, too.
        self.theta_specs = specs.transform(
            lambda spec: dataclasses.replace(spec, is_frozen=spec.path in frozen)
        )
        averages = params.average_decay and Averages(self.theta_specs, params.average_decay)
        loss_scale = params.loss_scale.instantiate() if dtypes.scales_loss else None
        parts = (averages, loss_scale, spikes.from_params(params.spikes), *added)
        self.parts: dict[str, StatePart] = {part.name: part for part in parts if part}
        self.gradients = Gradients(
            self.task,
            dtypes,
            self.theta_specs,
            frozen,
            next((part for part in added if isinstance(part, Measured)), None),
            params.micro_batches,
            params.reduce_dtype,
        )
        if params.offload_moments and params.update_ratios_every:
            raise UserError(
                f"step.update_ratios_every is {params.update_ratios_every}, but update-to-weight "
                "ratios need all moments on the device, which step.offload_moments keeps in host "
                "memory. Set step.update_ratios_every = 0 or step.offload_moments = False"
            )
        self._ratios = UpdateRatios(params.update_ratios_every, self.optimizer, self.theta_specs)

    def check_device(self, platform: str, name: str, capability: str = "") -> None:
        """Checks that devices compute the step in its precision; see `StepFeature`."""
        for feature in self.features:
            feature.check_device(self.precision, platform, name, capability)

    def device_notes(self, platform: str, has_kernels: bool = True) -> list[str]:
        """Returns sentences on what devices compute in another way; see `StepFeature`."""
        found = (
            each.device_notes(self.precision, self.task, platform, has_kernels)
            for each in self.features
        )
        return [note for notes in found for note in notes]

    @property
    def evaluated_part(self) -> str:
        """The part of the state that is evaluated and decoded with: `averages` or `theta`."""
        return Averages.name if Averages.name in self.parts else "theta"

    def evaluated_theta(self, part: NestedMap) -> NestedMap:
        """Returns weights, in their own dtypes, from the state's `evaluated_part`."""
        averages = self.parts.get(Averages.name)
        return averages.to_weights(part) if isinstance(averages, Averages) else part

    @property
    def sharded_parts(self) -> dict[str, str]:
        """The sharded parts of the state, and the kind of tensor that each is split as."""
        weights = MASTERS if self.precision.has_master_weights else "weights"
        return dict(zip(SHARDED_PARTS, (weights, "moments", "moments"), strict=True))

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
        """Returns the metrics of a step without values that only other steps have.

        Args:
          step: number of the step, from 1.
          metrics: its metrics.
        """
        return update_ratios.only_if_due(step, metrics, self.p.update_ratios_every)

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
        self,
        state: NestedMap,
        batch: TensorBatch,
        on_result: context.ResultObserver | None = None,
    ) -> micro_batches.Result:
        """Returns the loss, the metrics and the gradients of the next step.

        What the backward pass measures for a part of the state is an entry of the gradients.

        Args:
          state: the state before the step.
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
          state: the state before the step.
          loss: the training loss.
          metrics: name -> (value, weight).
          gradients: the gradients, from `step_gradients`.
        """
        gradients = NestedMap(gradients)
        measured = {name: gradients.pop(name) for name in self.parts if name in gradients}
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            specs = self.theta_specs
            moves = [*map(self.optimizer.moves, specs.flatten())]
            norm = update_ratios.global_norm(gradients, moves)
            learning_rate = self.schedule(state.step)
            clipped = Clipping(gradients, specs, norm, self.p.clip_norm)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)
        seen = Seen(loss, norm, finite, measured)
        verdicts = {name: part.judge(state[name], seen) for name, part in self.parts.items()}
        new_state, outcome = self._next_state(state, clipped, learning_rate, seen, verdicts)
        values = NestedMap(loss=loss, gradient_norm=norm, learning_rate=learning_rate)
        values.update({name: value for name, (value, _) in metrics.items() if name != "loss"})
        rest = (outcome.updates, learning_rate, outcome.is_skipped)
        values.update(self._ratios.metrics(new_state, clipped, *rest))
        for name, part in self.parts.items():
            values.update(part.metrics(state[name], new_state[name], verdicts[name]))
        return new_state, values.transform(lambda value: tf.cast(value, tf.float32))

    def _next_state(
        self,
        state: NestedMap,
        clipped: Clipping,
        learning_rate: tf.Tensor,
        seen: Seen,
        verdicts: dict[str, Verdict],
    ) -> tuple[NestedMap, Outcome]:
        """Returns the state after a step, and how it was updated.

        Args:
          state: the state before the step.
          clipped: the gradients and how they are clipped.
          learning_rate: the step's learning rate.
          seen: facts on the step.
          verdicts: what the parts of the state say of it, by name.
        """
        goes_on, updates = seen.finite, state.step
        for name, part in self.parts.items():
            goes_on |= verdicts[name].goes_on
            updates -= part.skipped_so_far(state[name])
        stopped = is_skipped = state.stopped | tf.logical_not(goes_on)
        for verdict in verdicts.values():
            is_skipped |= verdict.is_skipped
        theta, moments = self._updated(state, clipped, updates, learning_rate, is_skipped)
        step = tf.where(stopped, state.step, state.step + 1)
        new_state = NestedMap(step=step, stopped=stopped, theta=theta, moments=moments)
        outcome = Outcome(theta, updates, is_skipped, stopped)
        for name, part in self.parts.items():
            new_state[name] = part.after(state[name], seen, verdicts[name], outcome)
        return new_state, outcome

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
