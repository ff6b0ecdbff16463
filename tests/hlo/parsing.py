"""Programs for tests, written as HLO text that XLA's own parser reads."""

from collections.abc import Iterable

from jaxlib import _hlo

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo import OperationList, read_operations
from lingvo_gshard.wings.hlo.module import Module, Shape


def parse_module(text: str) -> Module:
    """Returns the module of HLO text. A line `HloModule ...` at the beginning may be left out."""
    if not text.startswith("HloModule"):
        text = f"HloModule test\n\n{text}"
    return Module.from_bytes(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def operations_of_text(text: str, mesh: Mesh, layers: Iterable[str] | None = None) -> OperationList:
    """Returns the operations of HLO text."""
    return read_operations(parse_module(text), mesh, layers)


def parse_shape(text: str) -> Shape:
    """Returns the shape that HLO text writes, such as `f32[8,128]{1,0:T(8,128)S(1)}`."""
    text = f"ENTRY %m {{\n  ROOT %p = {text} parameter(0)\n}}\n"
    return parse_module(text).entry.root.shape
