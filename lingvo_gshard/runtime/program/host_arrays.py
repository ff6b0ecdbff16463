"""Arguments and results of a lowered program that live in the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.lazy import ir, jax
from lingvo_gshard.core.memory_kinds import DEVICE, HOST
from lingvo_gshard.runtime.program.array import Array

_KIND = "mhlo.memory_kind"


def name_kinds(
    lowered: jax.stages.Lowered, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """Writes the memory kind of each argument and result into a lowered program.

    jax has written them, except for the GPUs of a described topology, whose memories it does not
    know.

    Args:
      lowered: the program, which is changed.
      inputs: its arguments.
      outputs: its results.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = ir.SymbolTable(module.operation)["main"]
        for name, arrays in (("arg_attrs", inputs), ("res_attrs", outputs)):
            found = ir.ArrayAttr(main.attributes[name])
            pairs = zip(found, arrays, strict=True)
            main.attributes[name] = ir.ArrayAttr.get([_with_kind(*pair) for pair in pairs])


def _with_kind(attributes: ir.Attribute, array: Array) -> ir.Attribute:
    named = {each.name: each.attr for each in ir.DictAttr(attributes)}
    return ir.DictAttr.get(
        {**named, _KIND: ir.StringAttr.get(HOST if array.is_on_host else DEVICE)}
    )
