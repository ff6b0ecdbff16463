"""Reading what XLA says: the collectives in compiled HLO text, and the partitioner's warnings."""

from __future__ import annotations

import collections
import dataclasses
import re

KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) "
    rf"(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_OPERATION_NAME = re.compile(r'op_name="([^"]*)"')
_TENSOR = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# Stands in every line that `rematerializations` reads.
REMATERIALizED = "Involuntary full rematerialization"
_WARNING = re.compile(
    rf"{REMATERIALizED}.*?from sharding (?P<before>.*?) to (?P<after>.*?) "
    r"efficiently for HLO operation (?P<operation>.*)"
)
_WRAPPERS = re.compile(r"^(?:jit\([^)]*\)/)+(?:call_exported[^/]*/)?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one device's program: kind, bytes of its result, and where it comes from."""

    kind: str
    bytes: int
    operation: str


@dataclasses.dataclass(frozen=True)
class Rematerialization:
    """A tensor made whole on every device because no cheaper change of layout was found.

    operation: with the layer's name; of one that the partitioner itself made, its name and type.
    """

    operation: str
    before: str
    after: str


def collectives(text: str) -> list[Collective]:
    """Returns the collectives in HLO text, in its order; one in a loop counts once."""
    return [
        Collective(match["kind"], _bytes(_result(match)), operation_name(match["rest"]))
        for match in _INSTRUCTION.finditer(text)
    ]


def count_by_kind(found: list[Collective]) -> dict[str, int]:
    """Returns kind -> how many, of those there are."""
    return dict(collections.Counter(collective.kind for collective in found))


def operation_name(text: str) -> str:
    """Returns the name that TensorFlow gave the operation: layer scopes and kind."""
    match = _OPERATION_NAME.search(text)
    return _WRAPPERS.sub("", match[1]) if match else ""


def rematerializations(compiler_output: str) -> list[Rematerialization]:
    """Returns the partitioner's warnings of involuntary full rematerialization, each once."""
    found = {
        Rematerialization(
            operation_name(match["operation"]) or _unnamed(match["operation"]),
            match["before"],
            match["after"],
        ): None
        for match in _WARNING.finditer(compiler_output)
    }
    return list(found)


def _unnamed(instruction: str) -> str:
    """The kind and type of an instruction that the partitioner made, which has no layer's name."""
    name, _, rest = instruction.partition(" = ")
    return f"{name} {rest.partition('{')[0]}".strip()


def _result(match: re.Match) -> str:
    """The type of a collective's result; what starts one gives its operands beside it."""
    if match["start"] and match["kind"] != "all-reduce" and match["type"].startswith("("):
        return _elements(match["type"])[1]
    return match["type"]


def _elements(tuple_type: str) -> list[str]:
    """The types in a tuple type, which may be tuples themselves."""
    elements, depth = [""], 0
    for character in tuple_type[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bytes(types: str) -> int:
    total = 0
    for name, sizes in _TENSOR.findall(types):
        elements = 1
        for size in filter(None, sizes.split(",")):
            elements *= int(size)
        total += -(-elements * _element_bits(name) // 8)
    return total


def _element_bits(name: str) -> int:
    if name == "pred":
        return 8
    bits = re.search(r"\d+", name)
    return int(bits[0]) if bits else 0
