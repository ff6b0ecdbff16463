"""Lowers without TensorFlow's constant folding.

TensorFlow evaluates what depends on no input before it lowers a function for XLA, up to 10 MiB per
tensor. The counters of dropout, for example, then become literals of the global batch's size, and a
program grows with its devices. Without folding they stay iotas, which XLA's partitioner splits.

A verification computes in float64 what is float32 in StableHLO. What TensorFlow has folded by then
is rounded to float32, and where it folds depends on the annotations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.autodiff.barrier import optimization_barrier
from lingvo_gshard.core.lazy import ir, op_callbacks, pywrap_tfe, tf
from lingvo_gshard.runtime.lowering.value_splits import maker_of

_lock = threading.Lock()
# Number of threads inside `without_folding`, and the setting before the first one entered.
_inside = 0
_was_disabled = False


@contextlib.contextmanager
def without_folding() -> Iterator[None]:
    """Turns TensorFlow's constant folding for XLA off, for the process, inside the context."""
    global _inside, _was_disabled
    with _lock:
        if not _inside:
            _was_disabled = bool(pywrap_tfe.TF_GetXlaConstantFoldingDisabled())
            pywrap_tfe.TF_SetXlaConstantFoldingDisabled(True)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                pywrap_tfe.TF_SetXlaConstantFoldingDisabled(_was_disabled)


_BARRIER, _CONSTANT = "stablehlo.optimization_barrier", "stablehlo.constant"
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
# Their float operands must be known when TensorFlow lowers them. Small integers are exact.
_OF_KNOWN_VALUES = ("Range", "LinSpace")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@contextlib.contextmanager
def unfolded_constants() -> Iterator[None]:
    """Puts a barrier behind every float32 constant that is traced inside a `with` block.

    TensorFlow folds integers as before. Their conversions to float32 count as constants.
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
        yield
    finally:
        op_callbacks.remove_op_callback(on_operation)


def _set_size(numbers: tf.Tensor) -> None:
    """Sets the shape of a Range, which TensorFlow did not find behind the barriers."""
    start, limit, delta = (tf.get_static_value(each) for each in numbers.op.inputs)
    if None not in (start, limit, delta):
        numbers.set_shape([len(np.arange(start, limit, delta))])


def remove_barriers(module: ir.Module) -> None:
    """Removes the barriers behind constants from a lowered module.

    Each use gets a constant of its own, as TensorFlow writes them (lowering/manual_constants.py).
    """
    barriers: list[tuple[ir.Operation, ir.Operation]] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == _BARRIER and len(operation.operands) == 1:
            maker = maker_of(operation.operands[0])
            if maker is not None and maker.name == _CONSTANT:
                barriers.append((operation, maker))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for barrier, constant in barriers:
        for use in list(barrier.results[0].uses):
            with ir.InsertionPoint(use.owner):
                use.owner.operands[use.operand_number] = constant.clone().operation.results[0]
        barrier.erase()
