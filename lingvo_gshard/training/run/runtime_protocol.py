"""The interface between training and what runs its steps.

A runtime holds the state of one trainer, compiles its functions and runs them. The training loop,
decoding, the Python API and the tools use a runtime only through `Runtime`. The implementations are

    runtime/single_device.py           one GPU or CPU
    runtime/spmd.py                    all devices of a mesh
    runtime/local_updates/runtime.py   workers that average their weights from time to time
    runtime/tpu_strategy.py            the cores of a TPU, through TensorFlow's TPU build
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch
from lingvo_gshard.data.token_kinds import TokenKinds
from lingvo_gshard.training.run.monitoring.compilations import Compilation
from lingvo_gshard.training.run.routers.counts import ReadSums

# Maps a metric's name to (value, weight); the mean over batches weights values by their weights.
WeightedMetrics = dict[str, tuple[float, float]]


class Metrics(Protocol):
    """The scalar metrics of a step that may still be running."""

    def read(self) -> dict[str, float]:
        """Waits for the step and returns name -> value, the float32 that the step computed."""
        ...


class Runtime(WeightsHolder, Protocol):
    """Holds a trainer's state on its devices and runs the trainer's steps on it.

    In a cluster, all processes make identical calls in one order, with identical global batches. A
    process may leave out the tokens of rows that are not its `own_rows` from a training batch.

    A runtime that has a state runs steps; it gets one by `init_state` or `load_state`. With
    `load_theta` it gets weights alone, which is enough for `eval_step` and `bind_weights`.
    """

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 CPU devices as data=8`."""
        ...

    @property
    def step(self) -> int:
        """Number of steps taken."""
        ...

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        ...

    @property
    def compile_count(self) -> int:
        """Number of programs compiled so far."""
        ...

    @property
    def compilations(self) -> Sequence[Compilation]:
        """The programs compiled so far; later ones are not always at the end."""
        ...

    def peak_device_memory(self) -> int | None:
        """Returns the most bytes that were ever in use on a device of this process.

        None means that the devices do not tell, as CPUs do not.
        """
        ...

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        ...

    def init_state(self) -> None:
        """Draws the initial weights and resets everything else."""
        ...

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state.

        Args:
          state: a tree like `state()`, of NumPy arrays or jax.Arrays. The next step may reuse the
            memory of jax.Arrays that already have the layout of `abstract_state`.
        """
        ...

    def load_theta(self, theta: NestedMap) -> None:
        """Replaces the evaluated weights; there is no other state afterwards.

        Args:
          theta: the part of a state that `Trainer.evaluated_part` names.
        """
        ...

    def state(self) -> NestedMap:
        """Returns the state as NumPy arrays or jax.Arrays, valid until the next step."""
        ...

    def abstract_state(self) -> NestedMap | None:
        """Returns shape, dtype and sharding of the state's arrays, as jax.ShapeDtypeStructs.

        None means that the runtime takes and returns NumPy arrays.
        """
        ...

    def theta_on_host(self) -> NestedMap:
        """Returns the unsharded weights as NumPy arrays, in every process."""
        ...

    def own_rows(self, specs: Mapping[str, tf.TensorSpec]) -> np.ndarray:
        """Returns which rows of a batch the devices of this process need, bool [B].

        Args:
          specs: shape and dtype of each array of the batch.
        """
        ...

    def train_step(self, batch: Batch) -> Metrics:
        """Takes one training step. Returns without waiting for it where the device allows."""
        ...

    def eval_step(self, batch: Batch) -> WeightedMetrics:
        """Returns the metrics of one batch without training."""
        ...

    def watch_routers(self, batch: Batch, kinds: TokenKinds | None, step: int) -> ReadSums:
        """Starts the forward pass of a training step that watches the routers.

        It has the weights before the step, the step's random numbers and the capacity of training,
        and changes nothing. Call it before `train_step`.

        Args:
          batch: the step's batch.
          kinds: the kinds of its tokens; None if they are unknown.
          step: number of the step, from 1.

        Returns:
          A function that waits for the sums of `routing_sums` and returns them by name.
        """
        ...


class StepMetrics:
    """Names of metrics, and a vector of their values that is read when it is needed."""

    def __init__(self, names: Sequence[str], read_values: Callable[[], np.ndarray]):
        """Wraps the metrics of one step.

        Args:
          names: a name for each element of the vector.
          read_values: waits for the step and returns the float32 vector.
        """
        self._names = names
        self._read_values = read_values

    def read(self) -> dict[str, float]:
        """Waits for the step and returns name -> value, the float32 that the step computed."""
        return dict(zip(self._names, self._read_values().tolist(), strict=True))
