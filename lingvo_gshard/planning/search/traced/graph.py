"""What the cost model knows of a task: its products, flows of tensors, weights and moments."""

from __future__ import annotations

import dataclasses
import functools
import math

import tensorflow as tf

from lingvo_gshard.core import letters
from lingvo_gshard.core.layer import VariableSpec


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor by its letters; unsplit: letters that stay whole."""

    layout: str
    shape: tuple[int, ...]
    dtype: str
    unsplit: str = ""

    @functools.cached_property
    def is_weight(self) -> bool:
        """Whether no dimension of it comes with the batch."""
        return not set(letters.TOKENS) & set(self.layout)

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Product:
    """An einsum of two operands in a forward pass, or a lookup of rows of a table.

    path: of its layer. times: how often it runs in a step. weights: paths of the weights that an
    operand is made of. unit: what is rematerialized as a whole, empty outside of all; begins_unit:
    whether this reads the unit's input. saved: what the backward pass reads of operands and
    result, each tensor with the first product to have it.
    A lookup is the product with a one-hot first operand, which nothing computes or moves; is_tied:
    whether another product has its table for a weight.
    """

    operands: tuple[Tensor, Tensor]
    result: Tensor
    path: str
    times: int = 1
    weights: tuple[str, ...] = ()
    unit: str = ""
    begins_unit: bool = False
    saved: tuple[Tensor, ...] = ()
    is_lookup: bool = False
    is_tied: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every letter."""
        tensors = (*self.operands, self.result)
        return {x: n for t in tensors for x, n in zip(t.layout, t.shape, strict=True)}


@dataclasses.dataclass(frozen=True)
class Flow:
    """A tensor that one layer marks and the same or another one reads, maybe by other letters."""

    source: Tensor
    target: Tensor
    source_path: str
    target_path: str
    times: int = 1
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A training step as the cost model sees it.

    moments: of each weight's path. inputs: bytes of a batch.
    """

    products: tuple[Product, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: dict[str, tuple[VariableSpec, ...]]
    layer_paths: tuple[str, ...]
    inputs: int = 0
