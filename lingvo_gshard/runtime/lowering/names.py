"""Gives a lowered module the same names in every process.

Caches of compiled programs find a program by its digest, so the same step must lower to the same
bytes in every process.
"""

from __future__ import annotations

import re

from lingvo_gshard.core.lazy import ir

# TensorFlow copies constants into functions, and numbers the copies in an order that differs.
_COPY = re.compile(r"/_\d+$")
# Operations that such a copy is lowered to.
_CONSTANTS = ("stablehlo.constant", "stablehlo.broadcast_in_dim")


def name_module(module: ir.Module, name: str) -> None:
    """Names a module, its functions, and its copies of constants.

    TensorFlow numbers functions by how many the process has traced before. One walk renames all
    uses: MLIR's own `replace_all_symbol_uses` walks the module once for every function.
    """
    module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
    functions = [function for function in module.body if function.name.value != "main"]
    names = {function.name.value: f"function_{index}" for index, function in enumerate(functions)}

    def rename(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(names.get(callee, callee))
        elif operation.name in _CONSTANTS:
            _rename_copy(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(rename)
    for function in functions:
        ir.SymbolTable.set_symbol_name(function, names[function.name.value])


def _rename_copy(operation: ir.Operation) -> None:
    """Takes the number off the name of a constant that TensorFlow copied."""
    location = operation.location
    found = location.locations if isinstance(location, ir.FusedLoc) else [location]
    if not any(isinstance(each, ir.NameLoc) and _COPY.search(each.name_str) for each in found):
        return
    renamed = [
        ir.Location.name(_COPY.sub("", each.name_str)) if isinstance(each, ir.NameLoc) else each
        for each in found
    ]
    operation.location = ir.Location.fused(renamed) if len(renamed) > 1 else renamed[0]
