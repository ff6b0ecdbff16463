"""Constants of a program: captured tensors, and copies that manual regions need.

TensorFlow makes additional parameters of tensors that a function uses from outside. A program has
no inputs but its arguments, so the values of captured tensors become constants.

Before partitioning, XLA merges equal constants wherever they are used. A constant that a manual
region uses becomes manual, and a computation outside the region that shares it cannot be
partitioned: the process aborts with `Check failed: !IsManualLeaf()`. XLA does not merge constants
of different functions, and inlines functions only right before it partitions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import func, ir, mlir, tf
from lingvo_gshard.runtime.lowering.annotations import ENTERS_REGION, call_target


def captured_constants(name: str, function: Any) -> list:
    """Returns the values of the tensors that a traced function captured, as NumPy arrays.

    Raises:
      UserError: the function captured variables, whose values a program cannot follow, or tensors
        without a value.
    """
    variables = sorted(variable.name for variable in function.graph.variables)
    if variables:
        more = f" and {len(variables) - 5} more" if len(variables) > 5 else ""
        raise UserError(
            f"{name} uses variables: {', '.join(variables[:5])}{more}. Make their values "
            "arguments, as stateless_call does for a Keras model"
        )
    captured = function.captured_inputs
    for tensor in captured:
        if not hasattr(tensor, "numpy") or tensor.dtype == tf.resource:
            raise UserError(f"{name} uses {tensor} from outside the function. Make it an argument")
    return [tensor.numpy() for tensor in captured]


def make_constants(module: ir.Module, values: list[np.ndarray]) -> None:
    """Replaces the last parameters of the module's main function by constants."""
    main = ir.SymbolTable(module.operation)["main"]
    block = main.regions[0].blocks[0]
    kept = len(block.arguments) - len(values)
    with ir.InsertionPoint.at_block_begin(block), main.location:
        for argument, value in zip(list(block.arguments)[kept:], values, strict=True):
            argument.replace_all_uses_with(mlir.ir_constant(np.asarray(value)))
    for index in reversed(range(kept, kept + len(values))):
        block.erase_argument(index)
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    kind = ir.FunctionType.get(kind.inputs[:kept], kind.results)
    main.attributes["function_type"] = ir.TypeAttr.get(kind)
    if "arg_attrs" in main.attributes:
        of_arguments = list(ir.ArrayAttr(main.attributes["arg_attrs"]))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(of_arguments[:kept])


_CONSTANT = ("stablehlo.constant", "stablehlo.iota")
# Operations whose bodies hold constants that can become calls. A reduction's body cannot.
_AROUND = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")


def separate_constants(module: ir.Module) -> None:
    """Moves every constant into a function of its own, in a module with manual regions."""
    constants: list[ir.Operation] = []
    has_regions = False

    def visit(operation: ir.Operation) -> ir.WalkResult:
        nonlocal has_regions
        has_regions |= call_target(operation) == ENTERS_REGION
        parent = operation.parent
        if operation.name in _CONSTANT and parent is not None and parent.name in _AROUND:
            constants.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if has_regions:
        for index, constant in enumerate(constants):
            _make_call(constant, f"constant_{index}", module)


def _make_call(constant: ir.Operation, name: str, module: ir.Module) -> None:
    """Replaces a constant by a call of a new function that returns it."""
    types = [result.type for result in constant.results]
    with constant.location:
        with ir.InsertionPoint(module.body):
            function = func.FuncOp(name, ([], types), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp(constant.clone().results)
        with ir.InsertionPoint(constant):
            call = func.CallOp(function, [])
    constant.results[0].replace_all_uses_with(call.results[0])
    constant.erase()
