"""Reads the partitioner's warnings of tensors that it can only reshard by replicating them."""

from __future__ import annotations

import dataclasses
import re

from lingvo_gshard.hlo.names import without_wrappers

# Every line that `full_replications` reads contains this text.
WARNING_TEXT = "Involuntary full rematerialization"
_WARNING = re.compile(
    rf"{WARNING_TEXT}.*?from sharding (?P<before>.*?) to (?P<after>.*?) "
    r"efficiently for HLO operation (?P<instruction>.*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class FullReplication:
    """A tensor that XLA replicates in full, because it knows no cheaper way to reshard it.

    XLA calls this involuntary full rematerialization, although it recomputes nothing.

    Attributes:
      operation: TensorFlow's name of the operation, with the layer's name scopes; for an
        instruction that the partitioner inserted, its own name and its shape.
      before: the tensor's sharding, as XLA writes it.
      after: the sharding that the next operation needs.
    """

    operation: str
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.operation} is replicated in full on every device to reshard it from "
            f"{self.before} to {self.after}"
        )


def full_replications(compiler_output: str) -> list[FullReplication]:
    """Returns the tensors that the compiler's output warns about, each once."""
    found = (
        FullReplication(_operation(match["instruction"]), match["before"], match["after"])
        for match in _WARNING.finditer(compiler_output)
    )
    return list(dict.fromkeys(found))


def _operation(instruction: str) -> str:
    op_name = _OP_NAME.search(instruction)
    operation = without_wrappers(op_name[1]) if op_name else ""
    if operation:
        return operation
    name, _, rest = instruction.partition(" = ")
    return f"{name} {rest.partition('{')[0]}".strip()
