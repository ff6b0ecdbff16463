"""Fused experts: one tensor for the experts of a layer, where a family has one for each expert.

Files of Qwen3-VL-MoE and of Qwen3.5-MoE have `mlp.experts.gate_up_proj`, with the gate and its
factor of all experts, and `mlp.experts.down_proj`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.open_models.shards import Box, Source

_FUSED = re.compile(r"(?P<layer>.*\.experts)\.(?P<name>gate_up_proj|down_proj)")
# Name of a fused tensor -> the names of the tensors of an expert that it holds, in order.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclasses.dataclass(frozen=True)
class ExpertPart(Source):
    """A matrix of one expert within a fused tensor.

    Attributes:
      fused: the fused tensor.
      expert: number of the expert.
      first: row of the expert's fused matrix that is the first of this one.
      is_transposed: whether the fused tensor has these rows as columns.
    """

    fused: Source
    expert: int
    first: int
    is_transposed: bool

    @property
    def nbytes(self) -> int:
        return self.fused.nbytes // math.prod(self.fused.shape) * math.prod(self.shape)

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the matrix, and the number of bytes that were read."""
        (start, stop), columns = box
        rows = (self.first + start, self.first + stop)
        inner = (columns, rows) if self.is_transposed else (rows, columns)
        found, read = self.fused.read_box([(self.expert, self.expert + 1), *inner])
        return found[0].T if self.is_transposed else found[0], read


def split_experts(
    tensors: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Source]:
    """Returns the tensors, with the matrices of single experts in place of fused tensors.

    Args:
      tensors: name -> tensor.
      shapes: name -> shape of the tensors that the model needs.
      where: the files, for messages.

    Raises:
      UserError: a fused tensor has another shape than its experts.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match and name not in shapes:
            names = [f"{match['layer']}.{{}}.{part}.weight" for part in _PARTS[match["name"]]]
            if names[0].format(0) in shapes:
                del found[name]
                parts = _parts(tensor, names, shapes[names[0].format(0)], where)
                found |= {part.name: part for part in parts}
    return found


def _parts(
    tensor: Source, names: list[str], shape: tuple[int, ...], where: str
) -> list[ExpertPart]:
    """Returns the matrices of one shape in a tensor. "{}" in a name is the expert's number."""
    rows, columns = shape
    fits = [tuple(tensor.shape[1:]) == each for each in _shapes(rows * len(names), columns)]
    if not any(fits):
        raise UserError(
            f"{where}: {tensor.name} has the shape {list(tensor.shape)}; matrices of "
            f"{rows * len(names)} x {columns} were expected for each expert"
        )
    if all(fits):
        raise UserError(
            f"{where}: {tensor.name} has square matrices, so rows and columns of its experts "
            "cannot be told apart; save it with one tensor for each expert"
        )
    return [
        ExpertPart(name.format(expert), shape, tensor.dtype, tensor, expert, index * rows, fits[1])
        for expert in range(tensor.shape[0])
        for index, name in enumerate(names)
    ]


def _shapes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rows, columns), (columns, rows)
