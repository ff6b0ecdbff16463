"""Traces functions so that TensorFlow folds no constants in float32.

A verification takes the float32 of StableHLO as float64. Constants that TensorFlow has folded are
already rounded to float32, and the annotations decide where TensorFlow folds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import optimization_barrier, tf
from lingvo_gshard.core.lazy import ir, op_callbacks
from lingvo_gshard.runtime import Rewrite, maker_of, operations_of

_BARRIER, _CONSTANT = "stablehlo.optimization_barrier", "stablehlo.constant"
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
# Their float operands must be known when TensorFlow lowers them. Small integers are exact.
_OF_KNOWN_VALUES = ("Range", "LinSpace")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@contextlib.contextmanager
def unfolded_constants() -> Iterator[Rewrite]:
    """Puts a barrier behind every float32 constant that is traced inside a `with` block.

    TensorFlow still folds integers. An integer that is converted to float32 counts as a constant.

    Yields:
      `remove_barriers`, for the lowered module.
    """
    known: set[tuple[int, str]] = set()
    behind: dict[tuple[int, str], tf.Tensor] = {}

    def barrier(tensor: tf.Tensor) -> tf.Tensor:
        passed = optimization_barrier([tensor])[0][0]
        behind[id(passed.graph), passed.name] = tensor
        return passed

    def on_operation(
        operation: str,
        inputs: Sequence[tf.Tensor],
        attributes: Any,
        outputs: Sequence[tf.Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> list[tf.Tensor] | None:
        if graph is None or len(outputs) != 1 or operation in (*_CONTROL_FLOW, *_CALLS):
            return None
        if operation in _OF_KNOWN_VALUES and outputs[0].dtype == tf.float32:
            for index, each in enumerate(inputs):
                constant = behind.get((id(each.graph), each.name))
                if constant is not None:
                    outputs[0].op._update_input(index, constant)
            if operation == "Range":
                _set_size(outputs[0])
            return [barrier(outputs[0])]
        of_constants = bool(inputs) and all((id(x.graph), x.name) in known for x in inputs)
        if operation != "Const" and not of_constants:
            return None
        (output,) = outputs
        if output.dtype == tf.float32:
            return [barrier(output)]
        if not output.dtype.is_floating:
            known.add((id(graph), output.name))
        return None

    op_callbacks.add_op_callback(on_operation)
    try:
        yield remove_barriers
    finally:
        op_callbacks.remove_op_callback(on_operation)


def _set_size(numbers: tf.Tensor) -> None:
    """Sets the shape of a Range, which TensorFlow did not find behind the barriers."""
    start, limit, delta = (tf.get_static_value(each) for each in numbers.op.inputs)
    if None not in (start, limit, delta):
        numbers.set_shape([len(np.arange(start, limit, delta))])


def remove_barriers(module: ir.Module) -> None:
    """Removes the barriers behind constants from a lowered module.

    Each use gets a constant of its own, as TensorFlow writes them.
    """
    barriers = [each for each in operations_of(module) if each.name == _BARRIER]
    makers = [(each, maker_of(each.operands[0])) for each in barriers if len(each.operands) == 1]
    constants = [(each, maker) for each, maker in makers if maker and maker.name == _CONSTANT]
    for barrier, constant in constants:
        for use in list(barrier.results[0].uses):
            with ir.InsertionPoint(use.owner):
                use.owner.operands[use.operand_number] = constant.clone().operation.results[0]
        barrier.erase()
