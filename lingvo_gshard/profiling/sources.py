"""Finds the line of the model's code behind an operation of the compiled step.

Compiled programs name operations, but not lines: TensorFlow passes on only its own innermost frame.
The step is therefore traced once more, without compiling it, and its operations are asked.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping

from lingvo_gshard.core.layer import Layer, scope_name
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.tracing.graph_lines import line_of_operation
from lingvo_gshard.core.tracing.source_lines import shown
from lingvo_gshard.hlo import names as hlo_names
from lingvo_gshard.planning.kinds import OPTIMIZER
from lingvo_gshard.runtime.program.step_programs import BatchSpecs
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.training.trainer import Trainer

_NUMBER = re.compile(r"_\d+$")
# Name scopes that the backward pass adds to those of the forward pass.
_BACKWARD = re.compile(r"(?:gradient_tape|gradients(?:_\d+)?|rematerialized(?:_\d+)?)/")


class SourceLines:
    """Finds lines by the names of operations.

    Args:
      trainer: the trainer of the step.
      batch: shape and dtype of each array of a batch.
        partitioning: the mesh and strategy; None on one device.
    """

    def __init__(self, trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning | None):
        self._trainer, self._batch, self._partitioning = trainer, batch, partitioning
        self._layers = {scope_name(layer.path): layer for layer in _all_layers(trainer.task)}

    def of(self, op_name: str) -> str:
        """Returns the file and line that made an operation, such as "attention/dense.py:40".

        An operation of the backward pass has the line of the forward operation that it
        differentiates. Without such a line it is that of the layer's class, and "" without a layer.
        """
        forward = _BACKWARD.sub("", op_name)
        scope = forward
        while "/" in scope:
            # Of two gradients of one operation, the second has a number.
            for name in (scope, _NUMBER.sub("", scope)):
                if name in self._lines:
                    return self._lines[name]
            scope = scope.rpartition("/")[0]
            if scope in self._layers:
                break
        layer, phase = hlo_names.layer_and_phase(op_name, frozenset(self._layers))
        if phase == OPTIMIZER:
            return _line_of_class(type(self._trainer.optimizer))
        return _line_of_class(type(self._layers[layer])) if layer else ""

    @functools.cached_property
    def _lines(self) -> Mapping[str, str]:
        """The line of each operation, and of each name scope the line of its first operation."""
        lines: dict[str, str] = {}
        for operation in _operations(self._traced()):
            line = line_of_operation(operation)
            name = _BACKWARD.sub("", operation.name)
            while line and name and name not in self._layers:
                lines.setdefault(name, line)
                name = name.rpartition("/")[0]
        return lines

    def _traced(self) -> tf.Graph:
        specs = self._trainer.state_specs()
        flat = [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.flatten()]

        def step(state: list[tf.Tensor], batch: dict[str, tf.Tensor]) -> list[tf.Tensor]:
            new_state, metrics = self._trainer.train_step(specs.pack(state), batch)
            return [*new_state.flatten(), *metrics.flatten()]

        traced = tf.function(step, jit_compile=True, autograph=False)
        if self._partitioning is None:
            return traced.get_concrete_function(flat, self._batch).graph
        with use_partitioning(self._partitioning):
            return traced.get_concrete_function(flat, self._batch).graph


def _all_layers(layer: Layer) -> Iterator[Layer]:
    yield layer
    for child in layer.child_layers():
        yield from _all_layers(child)


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, and of the functions that it calls in loops."""
    pending, seen = [graph], set()
    while pending:
        current = pending.pop()
        for operation in current.get_operations():
            yield operation
            for attribute in operation.node_def.attr.values():
                name = attribute.func.name
                if name and name not in seen:
                    seen.add(name)
                    called = getattr(current._get_function(name), "graph", None)
                    pending += [called] if called is not None else []


def _line_of_class(cls: type) -> str:
    """Returns the line of a class, or of its fprop if it has one of its own."""
    subject = vars(cls).get("fprop", cls)
    subject = inspect.unwrap(subject) if callable(subject) else cls
    try:
        filename = inspect.getsourcefile(subject) or ""
        return shown(filename, inspect.getsourcelines(subject)[1])
    except (OSError, TypeError):
        return ""
