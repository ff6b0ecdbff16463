"""Moves between the memories of a device and its host, from TensorFlow's form to XLA's.

core/memory_kinds.py marks the moves. XLA reads the memory kind from a frontend attribute, which
TensorFlow's custom calls lack.
"""

from __future__ import annotations

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.core.memory_kinds import MOVE
from lingvo_gshard.runtime.lowering.shardy import call_target

_CONFIG, _PLACEMENT = "backend_config", "_xla_buffer_placement"
# XLA knows the call without the attributes that TensorFlow adds.
_TENSORFLOWS = ("api_version", "operand_layouts", "result_layouts")


def name_memory_kinds(module: ir.Module) -> int:
    """Rewrites the moves of a module in place; returns their number."""
    moves: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if call_target(operation) == MOVE:
            moves.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for move in moves:
        kind = move.attributes[_CONFIG]
        for name in _TENSORFLOWS:
            if name in move.attributes:
                del move.attributes[name]
        move.attributes[_CONFIG] = ir.StringAttr.get("")
        move.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({_PLACEMENT: kind})
    return len(moves)
