"""Manual regions share no constants with the rest of a program, or XLA's partitioner aborts.

Before it partitions, XLA makes one of equal constants, wherever they are used. One that a manual
region uses becomes manual, and a computation outside that uses it, too, cannot be partitioned any
more: the process ends with `Check failed: !IsManualLeaf()`. XLA does not look into functions for
that, and only puts them in place right before it partitions.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

_CONSTANT = ("stablehlo.constant", "stablehlo.iota")
# Of the operations that hold others, those that are computed as they stand: not a reduction's.
_AROUND = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")


def keep_apart(module: ir.Module) -> None:
    """Makes a call of a function of every constant, in a module that has manual regions."""
    constants, enters_region = [], []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in _CONSTANT and operation.parent.name in _AROUND:
            constants.append(operation)
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            enters_region.append(target == "SPMDFullToShardShape")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if any(enters_region):
        for index, constant in enumerate(constants):
            _make_call(constant, f"constant_{index}", module)


def _make_call(constant: ir.Operation, name: str, module: ir.Module) -> None:
    """Replaces an operation without operands by the call of a function that is only it."""
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
