"""Turns tensors that a TensorFlow function captures into constants of its program.

TensorFlow makes additional parameters of tensors that a function uses from outside. A program has
no inputs but its arguments, so the values of captured tensors become constants.
"""

from __future__ import annotations

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import ir, mlir, tf


def captured_constants(name: str, function: tf.types.experimental.ConcreteFunction) -> list:
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
