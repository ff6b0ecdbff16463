"""The runtime of local updates: workers train alone and average their weights from time to time.

Each worker runs an ordinary training step on its own devices, so nothing passes between workers.
After every `step.local_updates.every` steps an outer step, one program over all devices, makes
the workers' weights equal (wings/optimizers/local_updates.py). Evaluation, decoding and the saved
`theta` use the weights after the last outer step. A checkpoint also has the workers' own states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import (
    BoundFunction,
    Device,
    NestedMap,
    UserError,
    WeightsFunction,
    jax,
    jnp,
    tf,
)
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import (
    Array,
    Compilation,
    CompiledStep,
    Executable,
    Program,
    SpmdOptions,
    SpmdRuntime,
    StepCompiler,
    batch_key,
    batch_specs,
    compilations,
    lower,
    platform_of,
    state_arrays,
    train_program,
    traits_of,
)
from lingvo_gshard.sharding import Partitioning, annotate_weights
from lingvo_gshard.training import Measurement, ReadMeasured, Trainer, WeightedMetrics
from lingvo_gshard.wings.local_updates.workers import MeanMetrics, Workers, stacked
from lingvo_gshard.wings.optimizers.local_updates import OUTER, WORKERS, LocalUpdates


def rule_of(trainer: Trainer) -> LocalUpdates:
    """Returns the outer step of a trainer."""
    return trainer.p.local_updates.instantiate()


def outer_step_program(
    trainer: Trainer, count: int, everywhere: Partitioning, partitioner: str
) -> Program:
    """Returns the program that makes the workers' weights equal.

    Inputs: the weights of all workers, the weights after the previous outer step, the outer
    optimizer's moments, whether each worker has stopped, and the step. Outputs: new values of the
    first three, whose memory is donated.

    Args:
      everywhere: the partitioning over the devices of all workers.
    """
    rule, specs = rule_of(trainer), trainer.theta_specs
    kind = trainer.sharded_parts["theta"]
    arrays = [a for a in state_arrays(trainer, everywhere) if a.path.startswith("theta.")]
    moment_arrays = outer_moment_arrays(trainer, everywhere)
    worker_arrays = [stacked(array, count) for array in arrays]
    stopped = stacked(Array("stopped", (), "bool", ()), count)
    outputs = [*worker_arrays, *arrays, *moment_arrays]

    def outer_step(*inputs: tf.Tensor) -> list:
        *tensors, stopped_W, step = inputs
        weights, rest = tensors[: len(arrays)], tensors[len(arrays) :]
        theta = annotate_weights(specs.pack(rest[: len(arrays)]), specs, kind)
        moments = rule.moment_specs(specs).pack(rest[len(arrays) :])
        any_stopped = tf.reduce_any(stopped_W)
        means = specs.pack(tf.reduce_mean(tf.cast(x, tf.float32), 0) for x in weights)
        means = annotate_weights(means, specs, kind)
        new_theta, new_moments = rule.update(specs, theta, means, moments, step, any_stopped)
        # A worker that has stopped keeps the weights that led to it, for the diagnosis.
        new_weights = [
            tf.where(any_stopped, old, tf.broadcast_to(new[None], old.shape))
            for old, new in zip(weights, new_theta.flatten(), strict=True)
        ]
        values = [*new_weights, *new_theta.flatten(), *new_moments.flatten()]
        return [(a.path, x, a.split) for a, x in zip(outputs, values, strict=True)]

    inputs = [*outputs, stopped, Array("step", (), "int32", ())]
    donated = range(len(outputs))
    return lower("outer_step", outer_step, inputs, everywhere, donated, partitioner)


def outer_moment_arrays(trainer: Trainer, everywhere: Partitioning) -> list[Array]:
    """Returns the arrays of the outer optimizer's moments, split as their weights are."""
    specs = rule_of(trainer).moment_specs(trainer.theta_specs)
    return [
        Array(f"outer.{path}", s.shape, s.dtype, everywhere.spec_storage_split(s, "moments"))
        for path, s in specs.flatten_items()
    ]


# The collectives that sum over workers.
_SUMS = ("all-reduce", "reduce-scatter")


class LocalUpdatesRuntime:
    """Runs a trainer's steps on the workers of a mesh that has an axis `worker`.

    All workers begin with the same weights. Worker k draws its random numbers from
    `step.seed + k`. In a cluster each process has whole workers.
    """

    def __init__(
        self,
        trainer: Trainer,
        partitioning: Partitioning,
        devices: Sequence[Device],
        options: SpmdOptions | None = None,
    ):
        """Makes a runtime without a state. Arguments and errors are as in `SpmdRuntime`.

        Raises:
          UserError: also if the trainer averages weights, if the strategy splits a letter over
            `worker`, or if a worker's devices belong to several processes.
        """
        _check(trainer)
        options = options or SpmdOptions()
        self._trainer, self._partitioner = trainer, options.partitioner
        self._rule = rule_of(trainer)
        partitioning.mesh.check_devices(len(devices))
        partitioning = partitioning.on(platform_of(devices[0]), devices[0].device_kind)
        self._workers = Workers(partitioning, devices)
        self._local = self._workers.local
        self._trainers = {worker: _with_own_seed(trainer, worker) for worker in self._local}
        # Holds the weights after the last outer step, and evaluates them. The outer step reads and
        # writes them without padding.
        options = dataclasses.replace(options, pads_state=False)
        self._outer_weights = SpmdRuntime(
            trainer, self._workers.everywhere, self._workers.all_devices, options
        )
        self._specs = trainer.state_specs()
        self._arrays = state_arrays(trainer, self._workers.partitioning)
        self._outer_moment_arrays = outer_moment_arrays(trainer, self._workers.everywhere)
        self._states: dict[int, list[jax.Array]] = {}
        self._outer_moments: list[jax.Array] = []
        self._steps_taken = 0
        traits = traits_of(trainer, self._workers.partitioning)
        self._compiler = StepCompiler(options.compile_options, traits)
        self._messages = _unused_steps_warning(trainer)

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 CPU devices as worker=4,data=2`."""
        return self._outer_weights.device_summary

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._steps_taken

    @property
    def compilations(self) -> list[Compilation]:
        """The programs compiled so far, programs for evaluation first."""
        return [*self._outer_weights.compilations, *self._compiler.compilations]

    def peak_device_memory(self) -> int | None:
        """Returns the most bytes that were ever in use on a device of this process."""
        return self._outer_weights.peak_device_memory()

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        messages, self._messages = self._messages, []
        compiled = self._compiler.pop_messages()
        return [*self._outer_weights.pop_messages(), *compiled, *messages]

    def init_state(self) -> None:
        """Draws the initial weights, which are the same for all workers."""
        self._outer_weights.init_state()
        self._give_to_all_workers(self._outer_weights.state())

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state.

        Args:
          state: a tree of NumPy arrays or jax.Arrays. If it comes from a run without workers, all
            workers get its weights and step, and the optimizers' moments start from zero.
        """
        if WORKERS not in state:
            self._outer_weights.init_state()
            initial = self._outer_weights.state()
            initial.update(theta=state.theta, step=np.int32(state.step))
            self._give_to_all_workers(initial)
            return
        self._outer_weights.load_theta(state.theta)
        stacked = [
            self._workers.stacked(array).put(value, self._workers.mesh, is_donated=True)
            for array, value in zip(self._arrays, state[WORKERS].flatten(), strict=True)
        ]
        self._set_worker_states(stacked)
        self._outer_moments = self._put(self._outer_moment_arrays, state.get(OUTER, NestedMap()))
        self._steps_taken = int(state.step)

    def load_theta(self, theta: NestedMap) -> None:
        """Replaces the evaluated weights; there is no other state afterwards."""
        self._outer_weights.load_theta(theta)

    def state(self) -> NestedMap:
        """Returns the state as jax.Arrays. The next step makes it invalid."""
        state = NestedMap(
            step=np.int32(self._steps_taken),
            stopped=np.bool_(False),
            theta=self._outer_weights.state().theta,
            workers=self._specs.pack(self._stacked(i) for i in range(len(self._arrays))),
        )
        if self._outer_moments:
            state[OUTER] = self._outer_moment_specs().pack(self._outer_moments)
        return state

    def abstract_state(self) -> NestedMap:
        """Returns shape, dtype and sharding of the state's arrays, as jax.ShapeDtypeStructs."""
        outer, mesh = self._outer_weights.abstract_state(), self._workers.mesh
        stacked = (self._workers.stacked(array) for array in self._arrays)
        state = NestedMap(
            step=outer.step,
            stopped=outer.stopped,
            theta=outer.theta,
            workers=self._specs.pack(array.sharded_struct(mesh) for array in stacked),
        )
        if self._outer_moment_arrays:
            structs = (array.sharded_struct(mesh) for array in self._outer_moment_arrays)
            state[OUTER] = self._outer_moment_specs().pack(structs)
        return state

    def theta_on_host(self) -> NestedMap:
        """Returns unsharded weights as NumPy arrays.

        If a worker of this process has stopped, these are the weights of that worker. Otherwise
        they are the weights after the last outer step. All processes must make this call.
        """
        outer = self._outer_weights.theta_on_host()
        for own in self._states.values():
            state = self._specs.pack(own)
            if bool(np.asarray(state.stopped)[0]):
                return state.theta.transform(lambda x: np.asarray(x)[0])
        return outer

    def own_rows(self, specs: Mapping[str, tf.TensorSpec]) -> np.ndarray:
        """Returns which rows of a batch the workers of this process need, bool [B]."""
        return self._outer_weights.own_rows(specs)

    def train_step(self, batch: Batch) -> MeanMetrics:
        """Takes one step of every worker, and an outer step when it is due, without waiting.

        Raises:
          UserError: the rows of the batch do not divide equally among the workers.
        """
        running = []
        for worker in self._local:
            rows = self._workers.rows_of(batch, worker)
            step = self._worker_step(worker, rows, compilations.inputs_of(batch))
            feed = step.feed(rows, self._workers.meshes[worker])
            *state, metrics = step.executable(*self._states[worker], *feed)
            self._states[worker] = state
            running.append(step.metrics(metrics))
        self._steps_taken += 1
        if self._steps_taken % self._rule.p.every == 0:
            self._take_outer_step()
        return MeanMetrics(running)

    def eval_step(self, batch: Batch) -> WeightedMetrics:
        """Returns the metrics of one batch, with the weights after the last outer step."""
        return self._outer_weights.eval_step(batch)

    def measure(self, name: str, function: Measurement, batch: Batch) -> ReadMeasured:
        """Starts a function of the weights after the last outer step."""
        return self._outer_weights.measure(name, function, batch)

    def bind_weights(self, function: WeightsFunction) -> BoundFunction:
        """Returns `function` of the weights after the last outer step."""
        return self._outer_weights.bind_weights(function)

    def executable(self, kind: str = "train") -> Executable:
        """Returns the program compiled last for an "init", "train", "outer" or "eval" step."""
        if kind in ("train", "outer"):
            return self._compiler.last(kind)
        return self._outer_weights.executable(kind)

    def _give_to_all_workers(self, state: NestedMap) -> None:
        """Starts every worker from a copy of the same state, with outer moments of zero."""
        values = self._put(state_arrays(self._trainer, self._workers.everywhere), state)
        count, mesh = self._workers.count, self._workers.mesh

        def copies(*arrays: jax.Array) -> list[jax.Array]:
            return [jnp.broadcast_to(array[None], (count, *array.shape)) for array in arrays]

        shardings = [self._workers.stacked(array).sharding(mesh) for array in self._arrays]
        self._set_worker_states(jax.jit(copies, out_shardings=shardings)(*values))
        self._outer_weights.load_theta(self._specs.pack(values).theta)
        zeros = jax.jit(
            lambda: [jnp.zeros(a.shape, a.dtype) for a in self._outer_moment_arrays],
            out_shardings=[a.sharding(mesh) for a in self._outer_moment_arrays],
        )
        self._outer_moments = list(zeros()) if self._outer_moment_arrays else []
        self._steps_taken = int(np.asarray(state.step))

    def _set_worker_states(self, stacked: Sequence[jax.Array]) -> None:
        """Replaces the workers' states by their shares of arrays stacked over all workers."""
        shares = [
            self._workers.unstack(array, value)
            for array, value in zip(self._arrays, stacked, strict=True)
        ]
        self._states = {worker: [share[worker] for share in shares] for worker in self._local}

    def _stacked(self, index: int) -> jax.Array:
        """Returns one array of the state, stacked over all workers."""
        shares = {worker: own[index] for worker, own in self._states.items()}
        return self._workers.stack(self._arrays[index], shares)

    def _take_outer_step(self) -> None:
        """Makes the workers' weights equal."""
        executable = self._outer_step().executable
        weights = [i for i, array in enumerate(self._arrays) if array.path.startswith("theta.")]
        stopped = next(i for i, array in enumerate(self._arrays) if array.path == "stopped")
        step = executable.program.inputs[-1].put(
            np.asarray(self._steps_taken, np.int32), self._workers.mesh
        )
        results = executable(
            *map(self._stacked, weights),
            *self._outer_weights.state().theta.flatten(),
            *self._outer_moments,
            self._stacked(stopped),
            step,
        )
        for index, result in zip(weights, results, strict=False):
            for worker, share in self._workers.unstack(self._arrays[index], result).items():
                self._states[worker][index] = share
        count = len(weights)
        theta = results[count : 2 * count]
        self._outer_weights.load_theta(self._specs.theta.pack(theta))
        self._outer_moments = list(results[2 * count :])

    def _worker_step(self, worker: int, rows: Batch, inputs: compilations.Inputs) -> CompiledStep:
        return self._compiler.step(
            "train",
            (worker, batch_key(rows)),
            self._workers.devices[worker],
            lambda: train_program(
                self._trainers[worker],
                self._workers.partitioning,
                self._partitioner,
                batch_specs(rows),
                is_stacked=True,
            ),
            inputs=inputs,
            is_reported=worker == self._local[0],
        )

    def _outer_step(self) -> CompiledStep:
        workers = self._workers
        made_of = (self._trainer, workers.count, workers.everywhere, self._partitioner)
        devices, before = self._workers.all_devices, len(self._compiler.compilations)
        step = self._compiler.step("outer", (), devices, lambda: (outer_step_program(*made_of), []))
        if len(self._compiler.compilations) > before:
            self._messages.append(self._exchange_message(step.executable))
        return step

    def _exchange_message(self, outer_step: Executable) -> str:
        """Says how much passes between workers: sums, since the rest stays within a worker."""
        moved = sum(row.bytes for row in outer_step.collectives() if row.kind in _SUMS) / 2**20
        every = self._rule.p.every
        return (
            f"local updates: {self._workers.count} workers synchronize every {every} steps and "
            f"exchange {moved:.2f} MiB per device, {moved / every:.3f} MiB per step"
        )

    def _outer_moment_specs(self) -> NestedMap:
        return self._rule.moment_specs(self._specs.theta)

    def _put(self, arrays: Sequence[Array], values: NestedMap) -> list[jax.Array]:
        pairs = zip(arrays, values.flatten(), strict=True)
        return [array.put(x, self._workers.mesh, is_donated=True) for array, x in pairs]


def _with_own_seed(trainer: Trainer, worker: int) -> Trainer:
    """Returns a trainer that draws other random numbers in each worker."""
    params = trainer.p.copy()
    params.seed += worker
    return params.instantiate(trainer.task, trainer.steps)


def _unused_steps_warning(trainer: Trainer) -> list[str]:
    """Returns a warning if the run does not end with an outer step."""
    steps, every = trainer.steps, trainer.p.local_updates.every
    if not steps % every:
        return []
    return [
        f"Warning: run.steps={steps} is no multiple of step.local_updates.every={every}: "
        f"the evaluated weights will be those of step {steps - steps % every:,}"
    ]


def _check(trainer: Trainer) -> None:
    if trainer.p.offload_moments:
        raise UserError(
            "step.offload_moments cannot be combined with "
            f"step.local_updates.every={trainer.p.local_updates.every}: each worker's moments are "
            "kept on its devices"
        )
    if trainer.p.average_decay:
        raise UserError(
            f"step.average_decay={trainer.p.average_decay} cannot be combined with "
            f"step.local_updates.every={trainer.p.local_updates.every}, which averages the "
            "evaluated weights over workers already"
        )
