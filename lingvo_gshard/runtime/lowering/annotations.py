"""Reads and writes sharding annotations in a module, which are custom calls."""

from __future__ import annotations

from lingvo_gshard.core.lazy import ir

CUSTOM_CALL = "stablehlo.custom_call"
# Targets of the calls at the start and at the end of a manual region.
ENTERS_REGION, LEAVES_REGION = "SPMDFullToShardShape", "SPMDShardToFullShape"
SHARDING = "mhlo.sharding"
_TARGET, _ANNOTATION = "call_target_name", "Sharding"


def call_target(operation: ir.Operation) -> str:
    """Returns the target of a custom call; "" if the operation is none."""
    if operation.name != CUSTOM_CALL:
        return ""
    return ir.StringAttr(operation.attributes[_TARGET]).value


def annotation_of(operation: ir.Operation) -> str:
    """Returns the text of a sharding annotation; "" if the operation is none."""
    if call_target(operation) != _ANNOTATION:
        return ""
    return ir.StringAttr(operation.attributes[SHARDING]).value


def annotated(value: ir.Value, text: str) -> ir.Value:
    """Returns a value with an annotation, which is added at the current insertion point.

    Args:
      value: the value.
      text: the sharding, as HLO writes it.
    """
    attributes = {_TARGET: ir.StringAttr.get(_ANNOTATION), SHARDING: ir.StringAttr.get(text)}
    call = ir.Operation.create(CUSTOM_CALL, [value.type], [value], attributes)
    return call.results[0]
