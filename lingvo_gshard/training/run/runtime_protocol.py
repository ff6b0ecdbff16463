"""The interface between training and what runs its steps.

A runtime holds the state of one trainer, compiles its functions and runs them. The implementations
are

    runtime/single_device.py           one GPU or CPU
    runtime/spmd.py                    all devices of a mesh
    wings/local_updates/runtime.py   workers that average their weights from time to time
    runtime/tpu_strategy.py            the cores of a TPU, through TensorFlow's TPU build

`wings/services/runtime.py` names what else they have, for those that watch a run or use its
weights.
"""

from __future__ import annotations

from typing import Protocol

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.step.metric_vectors import Measurement, ReadMeasured, WeightedMetrics


class Metrics(Protocol):
    """The scalar metrics of a step that may still be running."""

    def read(self) -> dict[str, float]:
        """Waits for the step and returns name -> value, the float32 that the step computed."""
        ...


class Runtime(Protocol):
    """Holds a trainer's state on its devices and runs the trainer's steps on it.

    In a cluster, all processes make identical calls in one order, with identical global batches. A
    process may leave out the tokens of rows that no device of its own needs from a training batch.

    A runtime that has a state runs steps; it gets one by `init_state` or `load_state`.
    """

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

    def train_step(self, batch: Batch) -> Metrics:
        """Takes one training step. Returns without waiting for it where the device allows."""
        ...

    def eval_step(self, batch: Batch) -> WeightedMetrics:
        """Returns the metrics of one batch without training."""
        ...

    def measure(self, name: str, function: Measurement, batch: Batch) -> ReadMeasured:
        """Starts a function of the weights, which changes nothing.

        Between two steps it sees the weights of the next step, before its update.

        Args:
          name: the kind of program, for messages on compilations.
          function: what is computed on the devices. Equal functions of arrays of equal shapes are
            compiled once, so a service makes its function once.
          batch: the arrays, such as the batch of the next step. The first two dimensions are rows
            and positions.

        Returns:
          A function that waits for the results and returns them by name.
        """
        ...

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        ...
