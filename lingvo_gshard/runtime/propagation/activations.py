"""Lists the activations of a step, each with its sharding and who has chosen it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lingvo_gshard.hlo.module import Instruction, Module
from lingvo_gshard.hlo.names import operation_name
from lingvo_gshard.hlo.shapes import element_bits, numpy_name
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.step_programs import PARTS
from lingvo_gshard.runtime.propagation.chosen import Chosen, chosen
from lingvo_gshard.runtime.propagation.dependence import dependents
from lingvo_gshard.runtime.propagation.traced import Traced
from lingvo_gshard.sharding.mesh import Mesh

# Phases of tensors that are activations. The task's own operations belong to no layer.
_PHASES = ("forward", "other")
# Opcodes that compute nothing, or whose results XLA hardly ever stores.
_NO_RESULT = ("parameter", "constant", "iota", "broadcast", "tuple", "bitcast")


class Activation(msgspec.Struct, frozen=True):
    """A tensor that a line of a layer computes.

    Attributes:
      layer: path of the layer; "" for the task itself.
      operations: TensorFlow's types of the operations that compute it, such as ("MatMul", "Relu").
      layout: letters of its annotation; "" if it has none.
      dtype: NumPy's name of its type.
      shape: its shape.
      asked: the sharding that its annotation asks for; "" if it has none.
      chosen: its sharding, which XLA chooses where nothing is asked.
      parts: number of different parts; 1 if every device holds the whole tensor.
      bytes: bytes of the whole tensor.
      bytes_per_device: bytes of the largest part.
      source: the line that computes it, such as "my_layer.py:12"; "" if it is unknown.
    """

    layer: str
    operations: tuple[str, ...]
    layout: str
    dtype: str
    shape: tuple[int, ...]
    asked: str
    chosen: str
    parts: int
    bytes: int
    bytes_per_device: int
    source: str


def activations(
    module: Module, inputs: tuple[Array, ...], traced: Traced, mesh: Mesh
) -> list[Activation]:
    """Returns the activations of a step's forward pass, by layer in the order of tracing.

    Tensors that one line computes are one activation if they have the same shape, type and
    sharding. Values that follow from weights alone are no activations.

    Args:
      module: the program before it is partitioned, with shardings.
      inputs: the program's inputs.
      traced: the operations of the function.
      mesh: the mesh.
    """
    is_weight = [array.path.partition(".")[0] in PARTS for array in inputs]
    relevant = dependents(module, [i for i, skip in enumerate(is_weight) if not skip])
    found: dict[tuple, tuple[tuple[int, int], Activation]] = {}
    for instruction in _instructions(module):
        name = operation_name(instruction.op_name)
        layer, phase = traced.layer(name)
        division = chosen(instruction, mesh)
        if instruction not in relevant or phase not in _PHASES or division is None:
            continue
        new = _activation(instruction, division, layer, name, traced)
        if not (layer or new.source):
            # Sums of gradients, and weights.
            continue
        key = (layer, new.source or name, new.shape, new.dtype, division)
        position = traced.position(layer, name)
        if key in found:
            other, known = found[key]
            position, new = min(position, other), _merged(known, new)
        found[key] = position, new
    return [row for _, row in sorted(found.values(), key=lambda pair: pair[0])]


def _instructions(module: Module) -> Iterator[Instruction]:
    """Yields the instructions that compute the tensors of layers."""
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode not in _NO_RESULT and instruction.shape.dimensions:
                yield instruction


def _activation(
    instruction: Instruction, division: Chosen, layer: str, name: str, traced: Traced
) -> Activation:
    shape, dtype = instruction.shape.dimensions, instruction.shape.dtype
    itemsize = max(element_bits(dtype) // 8, 1)
    annotation, kind = traced.annotation(name, division), traced.kind(name)
    layout = annotation.layout if annotation else ""
    return Activation(
        layer=layer,
        operations=() if annotation or not kind else (kind,),
        layout=layout,
        dtype=numpy_name(dtype),
        shape=shape,
        asked=annotation.in_words() if annotation else "",
        chosen=division.in_words(layout),
        parts=division.parts,
        bytes=instruction.shape.bytes,
        bytes_per_device=division.bytes_on_device(shape, itemsize),
        source=traced.lines.line(name),
    )


def _merged(one: Activation, other: Activation) -> Activation:
    """Returns one activation for two tensors of a line, with the annotation of either."""
    both = dict.fromkeys((*one.operations, *other.operations))
    annotated = one if one.asked or not other.asked else other
    return msgspec.structs.replace(annotated, operations=tuple(both))
