"""MeshSteps: takes the place of the functions that Model.fit calls for each step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core.lazy import Device, jax, tf
from lingvo_gshard.keras import model_state, step_programs
from lingvo_gshard.keras.layouts import Layouts
from lingvo_gshard.keras.mesh_state import MeshState
from lingvo_gshard.keras.model_state import METRICS
from lingvo_gshard.runtime import Executable, chosen_for

_log = logging.getLogger(__name__)


class _PreparedError(Exception):
    """Ends a `Model.fit` that was called for its first batch only."""


class MeshSteps:
    """Steps of one model over a mesh.

    Attributes:
      state: the model's variables on the devices; None before the first step.
      steps: number of training steps taken.
      sees_batches: whether callbacks read or set weights between the steps of an epoch.
    """

    def __init__(
        self,
        model: Any,
        layouts: Layouts,
        devices: Sequence[Device],
        partitioner: str = "gspmd",
        compile_options: Sequence[str] = (),
    ):
        """Prepares the steps, which are compiled when they are first taken.

        `compile_options` changes options of `runtime/compile_options.py`.
        """
        self._model, self._layouts = model, layouts
        self._devices, self._partitioner = list(devices), partitioner
        self._compile_options = tuple(compile_options)
        mesh = layouts.partitioning.mesh
        self._mesh = jax.sharding.Mesh(mesh.arrange(self._devices), mesh.names)
        self._compiled: dict[tuple[str, str], tuple[step_programs.StepProgram, Executable]] = {}
        self._epoch_begins = True
        self._on_start: list[Callable[[MeshState], None]] = []
        self._skipped = 0
        self.state: MeshState | None = None
        self.steps = 0
        self.sees_batches = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the model use these steps inside a `with` block."""
        model = self._model
        results, reset = model.get_metrics_result, model.reset_metrics

        def metrics_result() -> Any:
            if self.state is not None and tf.executing_eagerly():
                self.state.pull(METRICS)
            return results()

        def reset_metrics() -> None:
            reset()
            if self.state is not None:
                self.state.push(METRICS)

        # Keras calls methods of the instance, and makes no functions where there are some.
        vars(model).update(get_metrics_result=metrics_result, reset_metrics=reset_metrics)
        model.train_function, model.test_function = self.train, self.test
        try:
            yield
        finally:
            for name in ("get_metrics_result", "reset_metrics"):
                del vars(model)[name]
            model.train_function = model.test_function = None
            if self.state is not None:
                self.state.pull()

    def at_start(self, call: Callable[[MeshState], None]) -> None:
        """Has a function called with the state before the first step."""
        self._on_start.append(call)

    def prepare(self, fit: Callable[[], Any]) -> None:
        """Makes the state from the first batch that `fit` reads, and takes no step."""

        def train(iterator: Iterator[Any]) -> None:
            self._prepared(next(iterator))
            raise _PreparedError

        self._model.train_function = train
        with contextlib.suppress(_PreparedError):
            fit()
        self._model.train_function = self.train

    def skip(self, steps: int) -> None:
        """Reads the batches of so many steps without training on them."""
        self._skipped = steps

    def begin_epoch(self) -> None:
        """Says that a callback may have set any weight."""
        self._epoch_begins = True

    def reset_metrics(self) -> None:
        """Sets the metrics to the beginning of an epoch."""
        self._model.reset_metrics()

    def pull(self) -> None:
        """Copies the state into the model's variables."""
        if self.state is not None:
            self.state.pull()

    def train(self, iterator: Iterator[Any]) -> Any:
        """Takes as many training steps as `steps_per_execution` says; returns the last logs."""
        return self._take(step_programs.TRAIN, iterator)

    def test(self, iterator: Iterator[Any]) -> Any:
        """Evaluates as many batches as `steps_per_execution` says; returns the last logs."""
        return self._take(step_programs.TEST, iterator)

    def _take(self, kind: str, iterator: Iterator[Any]) -> Any:
        logs = {}
        for index in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if index == 0:
                    raise
                break
            logs = self._step(kind, batch)
        return logs

    def _step(self, kind: str, batch: Any) -> Any:
        state = self._prepared(batch)
        if kind == step_programs.TRAIN and self._skipped:
            self._skipped -= 1
            return {}
        state.push_changes(only_small=not (self._epoch_begins or self.sees_batches))
        self._epoch_begins = False
        step, executable = self._find(kind, batch)
        inputs = step.program.inputs[: step.batch_size]
        fed = [
            a.put(x, self._mesh)
            for a, x in zip(inputs, step_programs.as_arrays(batch), strict=True)
        ]
        results = executable(*fed, *state.values(step.state_paths))
        state.set_values(step.state_paths, results[step.log_size :])
        self.steps += kind == step_programs.TRAIN
        numbers = [result.addressable_data(0) for result in results[: step.log_size]]
        return tf.nest.map_structure(lambda index: numbers[index], step.logs)

    def _prepared(self, batch: Any) -> MeshState:
        """Returns the state, which is made before the first step."""
        if self.state is None:
            model_state.build(self._model, batch)
            self._held = model_state.held_variables(self._model, self._layouts)
            self._warn_of_unused_axes()
            self.state = MeshState(self._held, self._mesh)
            for call in self._on_start:
                call(self.state)
        return self.state

    def _find(self, kind: str, batch: Any) -> tuple[step_programs.StepProgram, Executable]:
        """Returns the compiled step for batches of a shape."""
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in step_programs.flat_batch(batch)]
        key = kind, repr(shapes)
        if key not in self._compiled:
            step = step_programs.lower_step(
                self._model, kind, batch, self._held, self._layouts, self._partitioner
            )
            options = chosen_for(self._devices[0], self._compile_options, program=step.program)
            self._compiled[key] = step, Executable(step.program, self._devices, options)
        return self._compiled[key]

    def _warn_of_unused_axes(self) -> None:
        splits = [each.array.split or () for each in self._held]
        mesh = self._layouts.partitioning.mesh
        for axis in self._layouts.unused_axes(splits):
            _log.warning(
                f"{self._model.name}: no weight is split over axis {axis} of `mesh={mesh}`. Unless "
                f"a layer annotates tensors with its letters, its {mesh.axis_size(axis)} devices "
                "all do the same work. `layout` says which weights are split"
            )
