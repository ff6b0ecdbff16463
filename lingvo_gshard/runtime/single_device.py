"""The runtime of one device: the state in tf.Variables, each step one XLA computation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import numpy as np

from lingvo_gshard.core import NestedMap, known_sizes, tf
from lingvo_gshard.core.bound_function import BoundFunction, WeightsFunction
from lingvo_gshard.data.input import Batch
from lingvo_gshard.runtime import offloading
from lingvo_gshard.runtime.compilations import Compilation, Inputs, compiling, inputs_of
from lingvo_gshard.training import ReadMeasured, TensorBatch, Trainer, metric_vector
from lingvo_gshard.training.step.metric_vectors import (
    Measurement,
    StepMetrics,
    WeightedMetrics,
    pair_with_weights,
    values_and_weights,
)


class SingleDeviceRuntime:
    """Runs a trainer's functions on the first GPU, or on the CPU.

    Weights and moments are updated in place. A step compiles once for each shape of a batch.

    Attributes:
      compilations: the training and evaluation steps compiled so far, in order. TensorFlow lowers,
        compiles and takes the first step in one call. The whole time of this call counts as
        compiling.
    """

    def __init__(self, trainer: Trainer):
        """Makes a runtime without a state.

        Raises:
          UserError: the GPU lacks the products of `step.precision`, or the trainer needs host
            memory.
        """
        offloading.refuse(trainer, "local")
        self._trainer = trainer
        self._messages = _check_device(trainer)
        self._variables: NestedMap | None = None
        self.compilations: list[Compilation] = []
        self._measured: dict[tuple, Callable[[TensorBatch], TensorBatch]] = {}
        self._train = _Compiled("train", self._train_step, self._compile, self.compilations)
        self._evaluate = _Compiled("eval", self._eval_step, self._compile, self.compilations)

    @property
    def device_summary(self) -> str:
        """The device in words, such as `1 CPU`."""
        kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        return f"1 {kind}"

    def peak_device_memory(self) -> int | None:
        """Returns the most bytes of the GPU that were ever in use; None without a GPU."""
        if not tf.config.list_logical_devices("GPU"):
            return None
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def init_state(self) -> None:
        """Draws the initial weights."""
        self.load_state(self._trainer.init_state())

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state by a tree of tensors or NumPy arrays."""
        if self._variables is None:
            self._variables = state.transform(lambda value: tf.Variable(value, trainable=False))
            return
        for variable, value in zip(self._variables.flatten(), state.flatten(), strict=True):
            variable.assign(value)

    def load_theta(self, theta: NestedMap) -> None:
        """Replaces the evaluated weights; there is no other state afterwards."""
        self.load_state(NestedMap({self._trainer.evaluated_part: theta}))

    @property
    def _held(self) -> NestedMap:
        assert self._variables is not None, "init_state, load_state or load_theta comes first"
        return self._variables

    def state(self) -> NestedMap:
        """Waits for the steps in progress and returns a copy of the state as NumPy arrays."""
        return self._held.transform(lambda variable: variable.numpy())

    def theta_on_host(self) -> NestedMap:
        """Returns a copy of the weights as NumPy arrays."""
        return self._held.theta.transform(lambda variable: variable.numpy())

    def abstract_state(self) -> NestedMap | None:
        """Returns None: the runtime takes and returns NumPy arrays."""
        return None

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return int(self._held.step.numpy())

    def own_rows(self, specs: Mapping[str, tf.TensorSpec]) -> np.ndarray:
        """Returns which rows of a batch the device needs: all."""
        return np.ones(known_sizes(next(iter(specs.values())).shape)[0], bool)

    def train_step(self, batch: Batch) -> StepMetrics:
        """Takes one training step. On a GPU it returns before the step is done."""
        return self._train(batch)

    def eval_step(self, batch: Batch) -> WeightedMetrics:
        """Returns the metrics of one batch, name -> (value, weight), without training."""
        return pair_with_weights(self._evaluate(batch).read())

    def measure(self, name: str, function: Measurement, batch: Batch) -> ReadMeasured:
        """Starts a function of the weights, and returns a function that waits for its results."""
        tensors = {name: tf.convert_to_tensor(x) for name, x in batch.items()}
        inputs = inputs_of(tensors)
        key = (function, *_key(inputs))
        if key not in self._measured:
            self._measured[key] = self._compile(functools.partial(self._call, function))
            started = time.monotonic()
            with compiling():
                results = self._measured[key](tensors)
                tf.nest.map_structure(lambda value: value.numpy(), results)
            seconds = time.monotonic() - started
            self.compilations.append(Compilation(name, inputs, 0.0, 0.0, seconds))
        else:
            results = self._measured[key](tensors)
        return lambda: {name: value.numpy() for name, value in results.items()}

    def bind_weights(self, function: WeightsFunction) -> BoundFunction:
        """Returns `function` with the current weights as its first argument."""
        compiled = self._compile(lambda ids: function(self._theta(), ids))
        return lambda ids: compiled(tf.convert_to_tensor(ids)).numpy()

    def _compile(self, function: Callable) -> Callable:
        """Returns a function of tensors as one XLA computation per combination of shapes."""
        return tf.function(function, jit_compile=True, autograph=False)

    def _train_step(self, batch: TensorBatch) -> NestedMap:
        state = self._held.transform(lambda variable: variable.read_value())
        new_state, metrics = self._trainer.train_step(state, batch)
        for variable, value in zip(self._held.flatten(), new_state.flatten(), strict=True):
            variable.assign(value, read_value=False)
        return metrics

    def _eval_step(self, batch: TensorBatch) -> NestedMap:
        return NestedMap(values_and_weights(self._trainer.eval_step(self._theta(), batch)))

    def _call(self, function: Measurement, batch: TensorBatch) -> TensorBatch:
        """Returns a function of the weights before a step."""
        return function(self._held.theta.transform(lambda v: v.read_value()), batch)

    def _theta(self) -> NestedMap:
        part = self._held[self._trainer.evaluated_part]
        return self._trainer.evaluated_theta(part.transform(lambda v: v.read_value()))


class _Compiled:
    """A function of a batch that returns metrics, compiled by XLA once per shape and type."""

    def __init__(
        self,
        name: str,
        function: Callable[[TensorBatch], NestedMap],
        compile_: Callable,
        compilations: list[Compilation],
    ):
        self._name = name
        self._function = function
        self._names: dict[tuple, list[str]] = {}
        self._compiled = compile_(self._trace)
        self._compilations = compilations
        self._tracing = 0.0

    def __call__(self, batch: Batch) -> StepMetrics:
        tensors = {name: tf.convert_to_tensor(x) for name, x in batch.items()}
        inputs = inputs_of(tensors)
        key = _key(inputs)
        values = self._compiled(tensors) if key in self._names else self._first(tensors, inputs)
        return StepMetrics(self._names[key], values.numpy)

    def _first(self, tensors: dict[str, tf.Tensor], inputs: Inputs) -> tf.Tensor:
        """Compiles the function for new inputs and returns its result."""
        started, self._tracing = time.monotonic(), 0.0
        with compiling():
            values = self._compiled(tensors)
            values.numpy()
        rest = time.monotonic() - started - self._tracing
        self._compilations.append(Compilation(self._name, inputs, self._tracing, 0.0, rest))
        return values

    def _trace(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        started = time.monotonic()
        self._names[_key(inputs_of(batch))], values = metric_vector(self._function(batch).items())
        self._tracing += time.monotonic() - started
        return values


def _check_device(trainer: Trainer) -> list[str]:
    """Returns notes on a trainer's precision on TensorFlow's first GPU, or on the CPU.

    Raises:
      UserError: the GPU lacks the products of the precision.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus or not trainer.precision.rounding:
        return trainer.device_notes("cpu")
    details = tf.config.experimental.get_device_details(gpus[0])
    capability = ".".join(map(str, details.get("compute_capability", ())))
    trainer.check_device("cuda", details.get("device_name", ""), capability)
    return trainer.device_notes("cuda", has_kernels=False)


def _key(inputs: Inputs) -> tuple:
    return tuple(inputs.items())
