"""The spmd runtime of local updates: workers that train alone and meet now and then.

Each worker runs an ordinary training step on its own devices, so that nothing can pass between
workers. Every trainer.local_updates.every steps one program over all devices makes the workers'
weights one (training/local_updates.py). The weights of the last meeting are what is evaluated,
decoded with, and written as a checkpoint's `theta`; beside them it has the workers' own states.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from lingvo_gshard.core.bound_function import WeightsFunction
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime import reports
from lingvo_gshard.runtime.local_updates.worker_programs import (
    meeting_program,
    moment_arrays,
    worker_program,
)
from lingvo_gshard.runtime.local_updates.workers import Workers
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Array
from lingvo_gshard.runtime.program.step_programs import state_arrays
from lingvo_gshard.runtime.spmd import SpmdFunction, SpmdRuntime, step_metrics
from lingvo_gshard.runtime.step_metrics import StepMetrics
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import processes
from lingvo_gshard.training.local_updates import OUTER, WORKERS
from lingvo_gshard.training.runtime_protocol import NumpyBatch, WeightedMetrics
from lingvo_gshard.training.trainer import Trainer

# A metric that is a sum over a batch, and weighs the others, which are means.
_TOKENS = "tokens"
# The collectives in which workers' weights are summed.
_SUMS = ("all-reduce", "reduce-scatter")


class WorkersMetrics:
    """Scalars of a step of all workers: means by tokens, and the sum of tokens."""

    def __init__(self, metrics: list[StepMetrics]):
        self._metrics = metrics

    def read(self) -> dict[str, float]:
        """Returns name -> value over all workers; waits for them."""
        mine = [metrics.read() for metrics in self._metrics]
        rows = [row for rows in processes.gather(mine) for row in rows]
        tokens = np.array([row.get(_TOKENS, 1.0) for row in rows])
        weights = tokens / tokens.sum() if tokens.sum() > 0 else np.full(len(rows), 1 / len(rows))
        means = {name: float(weights @ [row[name] for row in rows]) for name in rows[0]}
        return {**means, _TOKENS: float(tokens.sum())} if _TOKENS in means else means


class LocalUpdatesRuntime:
    """Runs a trainer's steps by the workers of a mesh with an axis `worker`.

    It has what SpmdRuntime has, and is used as that is. A worker draws its random numbers from
    trainer.seed and its own number; all begin with the same weights. Several processes may train
    together if each has whole workers.
    """

    def __init__(
        self,
        trainer: Trainer,
        partitioning: Partitioning,
        devices: Sequence[jax.Device],
        partitioner: str = "gspmd",
        max_replicated_megabytes: float | None = None,
    ):
        """Raises ValueError as SpmdRuntime does, and for what does not go with workers."""
        _check(trainer)
        self._trainer, self._partitioner = trainer, partitioner
        self._rule = trainer.local_updates
        partitioning.mesh.check_devices(len(devices))
        self._workers = Workers(partitioning, devices)
        self._mine = self._workers.mine
        self._trainers = {worker: _own_trainer(trainer, worker) for worker in self._mine}
        # Holds the weights of the last meeting.
        self._whole = SpmdRuntime(
            trainer,
            self._workers.everywhere,
            self._workers.all_devices,
            partitioner,
            max_replicated_megabytes,
        )
        self._specs = trainer.state_specs()
        self._arrays = state_arrays(trainer, self._workers.partitioning)
        self._moments = moment_arrays(trainer, self._workers)
        self._states: dict[int, list[jax.Array]] = {}
        self._outer: list[jax.Array] = []
        self._steps: dict[tuple, tuple[Executable, list[str]]] = {}
        self._meeting: Executable | None = None
        self._taken, self._seconds, self._notes = 0, 0.0, _steps_left_over(trainer)

    @property
    def device_summary(self) -> str:
        """The devices in words."""
        return self._whole.device_summary

    @property
    def compile_seconds(self) -> float:
        """Seconds spent so far tracing, lowering and compiling."""
        return self._whole.compile_seconds + self._seconds

    @property
    def compile_count(self) -> int:
        """The number of programs compiled so far; each worker has its own."""
        return self._whole.compile_count + len(self._steps) + bool(self._meeting)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._taken

    def pop_messages(self) -> list[str]:
        """Returns what there is to say since the last call."""
        notes, self._notes = self._notes, []
        return [*self._whole.pop_messages(), *notes]

    def init_state(self) -> None:
        """Draws the initial weights, which are the same for all workers."""
        self._whole.init_state()
        self._begin(self._whole.state())

    def load_state(self, state: NestedMap) -> None:
        """Takes over a state of NumPy arrays or jax.Arrays.

        One without workers, of a run without local updates, gives them weights and the step; the
        optimizer's moments begin anew.
        """
        if WORKERS not in state:
            self._whole.init_state()
            begun = self._whole.state()
            begun.update(theta=state.theta, step=np.int32(state.step))
            self._begin(begun)
            return
        self._whole.load_theta(state.theta)
        joined = zip(self._arrays, state[WORKERS].flatten(), strict=True)
        self._part([(array, self._joined(array, value)) for array, value in joined])
        self._outer = self._put(self._moments, state.get(OUTER, NestedMap()))
        self._taken = int(state.step)

    def load_theta(self, theta: NestedMap) -> None:
        """Takes over weights alone, to evaluate and decode with."""
        self._whole.load_theta(theta)

    def state(self) -> NestedMap:
        """Returns the state as it lies on the devices; the next step makes it invalid."""
        joined = (
            self._workers.joined(array, {worker: own[i] for worker, own in self._states.items()})
            for i, array in enumerate(self._arrays)
        )
        state = NestedMap(
            step=np.int32(self._taken),
            stopped=np.bool_(False),
            theta=self._whole.state().theta,
            workers=self._specs.pack(joined),
        )
        if self._outer:
            state[OUTER] = self._rule.moment_specs(self._specs.theta).pack(self._outer)
        return state

    def theta_on_host(self) -> NestedMap:
        """Returns weights as NumPy arrays: of a worker that has stopped, or of the last meeting.

        Of the workers of this process, that is: all processes have a part in the other.
        """
        whole = self._whole.theta_on_host()
        for own in self._states.values():
            state = self._specs.pack(own)
            if bool(np.asarray(state.stopped)[0]):
                return state.theta.transform(lambda x: np.asarray(x)[0])
        return whole

    def abstract_state(self) -> NestedMap:
        """Returns shape, type and layout of the state's arrays, as jax.ShapeDtypeStructs."""
        whole = self._whole.abstract_state()
        like = NestedMap(
            step=whole.step,
            stopped=whole.stopped,
            theta=whole.theta,
            workers=self._specs.pack(self._struct(self._workers.all(a)) for a in self._arrays),
        )
        if self._moments:
            specs = self._rule.moment_specs(self._specs.theta)
            like[OUTER] = specs.pack(map(self._struct, self._moments))
        return like

    def train_step(self, batch: NumpyBatch) -> WorkersMetrics:
        """Takes one step of every worker, and where it is time all meet; does not wait for it.

        Raises ValueError if the rows cannot be divided equally.
        """
        running = []
        for worker in self._mine:
            rows = self._workers.rows_of(batch, worker)
            executable, names = self._step_of(worker, rows)
            mesh = self._workers.meshes[worker]
            inputs = executable.program.inputs[-len(rows) :]
            feed = [a.put(rows[a.path.removeprefix("batch.")], mesh) for a in inputs]
            *state, metrics = executable(*self._states[worker], *feed)
            self._states[worker] = state
            running.append(step_metrics(names, metrics))
        self._taken += 1
        if self._taken % self._rule.p.every == 0:
            self._meet()
        return WorkersMetrics(running)

    def eval_step(self, batch: NumpyBatch) -> WeightedMetrics:
        """Returns name -> (value, weight) of one batch, with the weights of the last meeting."""
        return self._whole.eval_step(batch)

    def bind_weights(self, function: WeightsFunction) -> SpmdFunction:
        """Returns a function (theta, ids) -> tensor as one of ids alone, on the same weights."""
        return self._whole.bind_weights(function)

    def executable(self, kind: str = "train") -> Executable:
        """Returns the compiled program of the last "train" step, "meeting", "init" or "eval"."""
        if kind == "meeting":
            return self._compiled_meeting()
        if kind == "train" and self._steps:
            return list(self._steps.values())[-1][0]
        return self._whole.executable(kind)

    def _begin(self, state: NestedMap) -> None:
        """Gives every worker a state that is whole on all; each has copies of its own of it."""
        values = self._put(state_arrays(self._trainer, self._workers.everywhere), state)
        shardings = [self._struct(self._workers.all(array)).sharding for array in self._arrays]
        count = self._workers.count

        def copies(*arrays: jax.Array) -> list[jax.Array]:
            return [jnp.broadcast_to(array[None], (count, *array.shape)) for array in arrays]

        joined = jax.jit(copies, out_shardings=shardings)(*values)
        self._part(list(zip(self._arrays, joined, strict=True)))
        self._whole.load_theta(self._specs.pack(values).theta)
        zeros = jax.jit(
            lambda: [jnp.zeros(a.shape, a.dtype) for a in self._moments],
            out_shardings=[a.sharding(self._workers.mesh) for a in self._moments],
        )
        self._outer = list(zeros()) if self._moments else []
        self._taken = int(np.asarray(state.step))

    def _meet(self) -> None:
        """Makes the workers' weights one."""
        executable = self._compiled_meeting()
        places = [i for i, array in enumerate(self._arrays) if array.path.startswith("theta.")]
        stopped = next(i for i, array in enumerate(self._arrays) if array.path == "stopped")
        joined = [
            self._workers.joined(
                self._arrays[place], {worker: own[place] for worker, own in self._states.items()}
            )
            for place in (*places, stopped)
        ]
        step = executable.program.inputs[-1].put(np.int32(self._taken), self._workers.mesh)
        theta = self._whole.state().theta.flatten()
        results = executable(*joined[:-1], *theta, *self._outer, joined[-1], step)
        for place, whole in zip(places, results, strict=False):
            parts = self._workers.parted(self._arrays[place], whole, self._mine)
            for worker, part in parts.items():
                self._states[worker][place] = part
        count = len(places)
        self._whole.load_theta(self._specs.theta.pack(results[count : 2 * count]))
        self._outer = list(results[2 * count :])

    def _step_of(self, worker: int, rows: NumpyBatch) -> tuple[Executable, list[str]]:
        """A worker's compiled step and its metrics' names, made on first use."""
        key = (worker, *((name, rows[name].shape) for name in sorted(rows)))
        if key not in self._steps:
            started = time.monotonic()
            specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in sorted(rows.items())}
            program, names = worker_program(
                self._trainers[worker], self._workers, self._partitioner, specs
            )
            executable = Executable(program, self._workers.devices[worker])
            self._seconds += time.monotonic() - started
            self._steps[key] = executable, names
            if worker == self._mine[0]:
                self._notes += reports.compiled(executable)
        return self._steps[key]

    def _compiled_meeting(self) -> Executable:
        if self._meeting is None:
            started = time.monotonic()
            program = meeting_program(self._trainer, self._workers, self._partitioner)
            self._meeting = Executable(program, self._workers.all_devices)
            self._seconds += time.monotonic() - started
            self._notes += [*reports.compiled(self._meeting), self._exchanged()]
        return self._meeting

    def _exchanged(self) -> str:
        """What passes between workers, in words: sums, as all else is among a worker's devices."""
        found = self._meeting.collectives()
        moved = sum(row.bytes for row in found if row.kind in _SUMS) / 2**20
        every = self._rule.p.every
        return (
            f"local updates: {self._workers.count} workers meet every {every} steps and exchange "
            f"{moved:.2f} MiB per device, {moved / every:.3f} MiB a step"
        )

    def _part(self, joined: list[tuple[Array, jax.Array]]) -> None:
        """Takes over the workers' states, each array of all of them as one."""
        found = [self._workers.parted(array, whole, self._mine) for array, whole in joined]
        self._states = {worker: [parts[worker] for parts in found] for worker in self._mine}

    def _joined(self, array: Array, value: np.ndarray | jax.Array) -> jax.Array:
        whole = dataclasses.replace(self._workers.all(array), path=f"{WORKERS}.{array.path}")
        return whole.put(value, self._workers.mesh, taken_over=True)

    def _put(self, arrays: Sequence[Array], values: NestedMap) -> list[jax.Array]:
        pairs = zip(arrays, values.flatten(), strict=True)
        return [array.put(x, self._workers.mesh, taken_over=True) for array, x in pairs]

    def _struct(self, array: Array) -> jax.ShapeDtypeStruct:
        sharding = array.sharding(self._workers.mesh)
        return jax.ShapeDtypeStruct(array.shape, array.struct.dtype, sharding=sharding)


def _own_trainer(trainer: Trainer, worker: int) -> Trainer:
    """A trainer that draws other random numbers in each worker."""
    params = trainer.p.copy()
    params.seed += worker
    return params.instantiate(trainer.task)


def _steps_left_over(trainer: Trainer) -> list[str]:
    """What there is to say where a run does not end with a meeting."""
    steps, every = trainer.p.steps, trainer.local_updates.p.every
    if not steps % every:
        return []
    return [
        f"Warning: trainer.steps={steps} is no multiple of trainer.local_updates.every={every}: "
        f"the last {steps % every} steps are not in the weights that are evaluated"
    ]


def _check(trainer: Trainer) -> None:
    if trainer.p.average_decay:
        raise ValueError(
            f"trainer.average_decay={trainer.p.average_decay} does not go with "
            f"trainer.local_updates.every={trainer.local_updates.p.every}: what is evaluated is "
            "the mean of the workers' weights already"
        )
