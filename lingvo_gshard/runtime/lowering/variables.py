"""Variables of a lowered function, whose values become inputs and outputs of its program.

XLA takes the value of a variable that a function captures as a parameter, and returns the value
only if the function has written the variable. TensorFlow orders both by the first use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import UserError, optimization_barrier
from lingvo_gshard.core.lazy import ir, tf
from lingvo_gshard.runtime.lowering.operations import operations_of
from lingvo_gshard.runtime.program.array import Array

_BARRIER = "stablehlo.optimization_barrier"
# Names that an error has at most.
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class HeldVariable:
    """A variable that a function reads or writes, and its place in the function's program."""

    variable: tf.Variable
    array: Array


@dataclasses.dataclass(frozen=True)
class Captured:
    """The tensors and variables that a traced function captures.

    Attributes:
      constants: index of a parameter -> the value of the tensor that it stands for.
      held: the variables, in the order of their parameters and results.
    """

    constants: dict[int, np.ndarray]
    held: tuple[HeldVariable, ...]


def write_all(variables: Sequence[HeldVariable]) -> None:
    """Writes every variable with its own value, so that the lowered function returns all of them.

    A value without an operation behind it would count as unwritten. `remove_last_barriers` takes
    the operations away again.
    """
    for each in variables:
        ((passed,),) = optimization_barrier([each.variable.read_value()])
        each.variable.assign(passed)


def captured(name: str, function: Any, variables: Sequence[HeldVariable]) -> Captured:
    """Returns what a traced function uses from outside.

    Raises:
      UserError: the function uses another variable, whose value a program cannot follow, or a
        tensor without a value.
    """
    by_handle = {id(each.variable.handle): each for each in variables}
    others = [v.name for v in function.graph.variables if id(v.handle) not in by_handle]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(
            f"{name} uses variables: {', '.join(sorted(others)[:_SHOWN])}{more}. Make their values "
            "arguments, as stateless_call does for a Keras model"
        )
    inputs = function.captured_inputs
    first = len(function.inputs) - len(inputs)
    constants, held = {}, []
    for index, tensor in enumerate(inputs, first):
        if id(tensor) in by_handle:
            held.append(by_handle[id(tensor)])
        elif not hasattr(tensor, "numpy") or tensor.dtype == tf.resource:
            raise UserError(f"{name} uses {tensor} from outside the function. Make it an argument")
        else:
            constants[index] = tensor.numpy()
    return Captured(constants, tuple(held))


def remove_copies(module: ir.Module) -> None:
    """Removes copies of variables' new values, which compilers of other versions do not know."""
    for operation in operations_of(module):
        if operation.name == "mhlo.copy":
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()


def remove_last_barriers(module: ir.Module, count: int) -> None:
    """Removes the barriers that `write_all` put before the last results of the main function."""
    main = ir.SymbolTable(module.operation)["main"]
    block = main.regions[0].blocks[0]
    end = block.operations[-1]
    for index in range(len(end.operands) - count, len(end.operands)):
        maker: Any = end.operands[index].owner
        if not isinstance(maker, ir.Block) and maker.name == _BARRIER:
            end.operands[index] = maker.operands[0]
            maker.erase()
