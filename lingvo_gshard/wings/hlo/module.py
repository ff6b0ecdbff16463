"""Compiled programs as data: a module's computations and their instructions, read from protos.

The proto is XLA's, https://github.com/openxla/xla/blob/main/xla/service/hlo.proto, which all of its
compilers (CPU, GPU and TPU) return. messages.py has the classes that parse it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import jax
from lingvo_gshard.wings.hlo import messages


def read_module(compiled: jax.stages.Compiled) -> Module:
    """Returns the program that one device executes."""
    return Module.from_bytes(read_proto(compiled))


def read_proto(compiled: jax.stages.Compiled) -> bytes:
    """Returns the program that one device executes as a serialized HloModuleProto."""
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return module.as_serialized_hlo_module_proto()


class Module:
    """An HLO module.

    Attributes:
      computations: all computations, each after the computations that it calls.
      entry: the computation that runs when the program starts.
    """

    def __init__(self, proto: Any):
        sequences = proto.schedule.sequences
        self.is_scheduled = bool(sequences)
        self.computations = [
            Computation(computation, self, sequences[computation.id].instruction_ids)
            if computation.id in sequences
            else Computation(computation, self)
            for computation in proto.computations
        ]
        self._by_id = {computation.id: computation for computation in self.computations}
        self.entry = self._by_id[proto.entry_computation_id]

    @classmethod
    def from_bytes(cls, serialized: bytes) -> Module:
        """Returns the module of a serialized HloModuleProto."""
        return cls(messages.HloModuleProto.FromString(serialized))

    @classmethod
    def from_hlo(cls, serialized: bytes) -> Module:
        """Returns the module of a serialized HloProto."""
        return cls(messages.HloProto.FromString(serialized).hlo_module)

    def computation(self, identifier: int) -> Computation:
        """Returns the computation with this id."""
        return self._by_id[identifier]

    @functools.cached_property
    def embedded(self) -> frozenset[Computation]:
        """The computations of fusions and asynchronous operations; see Computation.is_embedded."""
        return frozenset(
            called
            for computation in self.computations
            for instruction in computation.instructions
            if instruction.opcode in ("fusion", "async-start")
            for called in instruction.called
        )


class Computation:
    """A list of instructions, each after its operands.

    Attributes:
      name: unique within the module.
      id: unique within the module.
      instructions: in the order of execution on the device, if the module is scheduled.
    """

    def __init__(self, proto: Any, module: Module, schedule: Sequence[int] = ()):
        self.name = proto.name
        self.id = proto.id
        self.module = module
        self._by_id = {each.id: Instruction(each, self) for each in proto.instructions}
        order = schedule or self._by_id
        self.instructions = [self._by_id[identifier] for identifier in order]
        self.root = self._by_id[proto.root_id]

    def instruction(self, identifier: int) -> Instruction:
        """Returns the instruction with this id."""
        return self._by_id[identifier]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[Instruction, list[Instruction]]:
        """For each instruction, the instructions that take its result, in order."""
        users: dict[Instruction, list[Instruction]] = {each: [] for each in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, ordered by their numbers."""
        parameters = [each for each in self.instructions if each.opcode == "parameter"]
        return sorted(parameters, key=lambda parameter: parameter.proto.parameter_number)

    @property
    def is_embedded(self) -> bool:
        """Whether a fusion or an asynchronous operation executes it as a single instruction.

        The values within an embedded computation take up no memory of their own.
        """
        return self in self.module.embedded


class Instruction:
    """One instruction of a computation.

    Attributes:
      proto: the HloInstructionProto, which holds the attributes of every opcode.
      name: unique within the module.
      opcode: HLO's name of the operation, such as "fusion" or "all-reduce-start".
    """

    def __init__(self, proto: Any, computation: Computation):
        self.proto = proto
        self.computation = computation
        self.name = proto.name
        self.opcode = proto.opcode

    def __repr__(self) -> str:
        return f"Instruction({self.name}: {self.opcode})"

    @functools.cached_property
    def shape(self) -> Shape:
        """The shape of the result."""
        return shape_from_proto(self.proto.shape)

    @functools.cached_property
    def operands(self) -> list[Instruction]:
        """The instructions whose results it takes, in order."""
        return [self.computation.instruction(each) for each in self.proto.operand_ids]

    @functools.cached_property
    def called(self) -> list[Computation]:
        """The computations that it calls; of a loop the body, then the condition."""
        return [self.computation.module.computation(i) for i in self.proto.called_computation_ids]

    @functools.cached_property
    def op_name(self) -> str:
        """The name that the frontend gave the operation; empty if the compiler added it."""
        return self.proto.metadata.op_name

    @functools.cached_property
    def backend_config(self) -> str:
        """The compiler's JSON options for this instruction; may be empty."""
        return self.proto.backend_config.decode(errors="replace")

    @functools.cached_property
    def executed(self) -> Instruction:
        """The instruction that runs: this one, or the single instruction that an async-start wraps.

        The attributes of an async-start, such as replica groups, are on the wrapped instruction.
        """
        if self.opcode != "async-start":
            return self
        (wrapped,) = self.called
        is_single = all(
            each.opcode == "parameter" for each in wrapped.instructions if each is not wrapped.root
        )
        return wrapped.root if is_single else self

    @property
    def base_opcode(self) -> str:
        """The opcode of the operation itself: "all-gather" for "all-gather-start"."""
        return self.executed.opcode.removesuffix("-start")

    @property
    def result(self) -> Shape:
        """The shape of what the operation computes.

        The start of an asynchronous operation returns a tuple that also holds the operands and
        internal state. They are left out.
        """
        if not self.opcode.endswith("-start") or self.shape.elements is None:
            return self.shape
        if self.opcode == "all-reduce-start":
            return self.shape
        return self.shape.elements[0 if self.opcode == "copy-start" else 1]


# HLO's short names of element types -> the beginning of NumPy's.
_NUMPY_NAMES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f": "float",
    "s": "int",
    "u": "uint",
    "c": "complex",
}
_FIRST_NUMBER = re.compile(r"\d+")

# XLA writes the dimension `*` of a tile, which is combined with the next one, as this number.
_COMBINED = -(2**63)

# Stands for types of newer compilers. Their bits are unknown.
_UNKNOWN = "opaque_type"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array, or of a tuple if `elements` is not None.

    Attributes:
      dtype: HLO's name of the element type, such as "f32"; "tuple" for a tuple.
      dimensions: sizes, major first as the program states them.
      layout: dimension numbers from minor to major; None if the program does not fix them.
      tile: sizes of the first tile, over the most minor dimensions, major first.
      space: the memory that holds the array; 0 is the device's main memory.
      elements: shapes of a tuple's elements.
    """

    dtype: str
    dimensions: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    tile: tuple[int, ...] = ()
    space: int = 0
    elements: tuple[Shape, ...] | None = None

    @functools.cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """All arrays of the shape, including arrays of nested tuples."""
        if self.elements is None:
            return (self,)
        return tuple(array for element in self.elements for array in element.arrays)

    @functools.cached_property
    def size(self) -> int:
        """The number of elements; of a tuple, the sum over its arrays."""
        if self.elements is None:
            return math.prod(self.dimensions)
        return sum(array.size for array in self.arrays)

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes of all elements, without padding."""
        return sum(-(-array.size * element_bits(array.dtype) // 8) for array in self.arrays)

    @functools.cached_property
    def padding(self) -> float:
        """The array's size in memory, where tiles pad its dimensions, over its own size."""
        if not self.tile or not self.size or not self.dimensions:
            return 1.0
        order = self.layout or tuple(reversed(range(len(self.dimensions))))
        factor = 1.0
        for dimension, tile in zip(order, reversed(self.tile), strict=False):
            size = self.dimensions[dimension]
            factor *= -(-size // tile) * tile / size
        return factor


def shape_from_proto(proto: Any) -> Shape:
    """Returns the shape that a proto describes."""
    return _shape_from_bytes(proto.SerializeToString())


@functools.lru_cache(maxsize=2**16)
def _shape_from_bytes(serialized: bytes) -> Shape:
    # A program repeats its shapes, tuples of hundreds of arrays among them.
    proto = messages.ShapeProto.FromString(serialized)
    if proto.element_type == messages.TUPLE:
        return Shape("tuple", elements=tuple(map(shape_from_proto, proto.tuple_shapes)))
    layout = proto.layout
    tile = layout.tiles[0].dimensions if layout.tiles else ()
    return Shape(
        dtype=messages.ELEMENT_TYPES.get(proto.element_type, _UNKNOWN),
        dimensions=tuple(max(size, 0) for size in proto.dimensions),
        layout=tuple(layout.minor_to_major) if proto.HasField("layout") else None,
        tile=tuple(1 if size == _COMBINED else size for size in tile),
        space=layout.memory_space,
    )


def element_bits(dtype: str) -> int:
    """Returns the bits of one element; 0 for a token."""
    if dtype == "pred":
        return 8
    bits = _FIRST_NUMBER.search(dtype)
    return int(bits[0]) if bits else 0


def numpy_name(dtype: str) -> str:
    """Returns NumPy's name of a type: "float32" for "f32", "bfloat16" for "bf16"."""
    if dtype in _NUMPY_NAMES:
        return _NUMPY_NAMES[dtype]
    match = re.fullmatch(r"([fsuc])(\d+)(\w*)", dtype)
    if not match:
        return dtype
    letter, bits, rest = match.groups()
    return f"{_NUMPY_NAMES[letter]}{bits}" + (f"_{rest}" if rest else "")
