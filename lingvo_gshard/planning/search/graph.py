"""A traced step for the cost model: einsums, flows of tensors, weights and moments."""

from __future__ import annotations

import dataclasses
import functools
import math

from lingvo_gshard.core import letters
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's shape and letters.

    Attributes:
      layout: one letter for each dimension.
      shape: size of each dimension.
      dtype: element type.
      unsplit: letters that are never sharded.
    """

    layout: str
    shape: tuple[int, ...]
    dtype: str
    unsplit: str = ""

    @functools.cached_property
    def is_weight(self) -> bool:
        """Returns whether the tensor has no batch dimension."""
        return not set(letters.TOKENS) & set(self.layout)

    @functools.cached_property
    def itemsize(self) -> int:
        """Returns the bytes of one element."""
        return tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        """Returns the bytes of the unsharded tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Einsum:
    """An einsum of two operands in the forward pass, or a lookup in a table.

    A lookup is an einsum with a one-hot first operand that costs nothing to compute or move.

    Attributes:
      operands: the operands.
      result: the result.
      path: path of the layer.
      times: executions in a step.
      weights: paths of the weights that an operand is made of.
      unit: the rematerialization unit; empty outside of all units.
      begins_unit: whether this is the first einsum of its unit.
      saved: tensors that the backward pass reads, if no earlier einsum saves them.
      is_lookup: whether it is a lookup.
      is_tied: whether an einsum, too, uses the table of a lookup as a weight.
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
        """Returns the size of each letter."""
        tensors = (*self.operands, self.result)
        return {x: n for t in tensors for x, n in zip(t.layout, t.shape, strict=True)}


@dataclasses.dataclass(frozen=True)
class Flow:
    """A tensor that one layer produces and the same or another layer reads.

    Attributes:
      source: the tensor with the producer's letters.
      target: the tensor with the reader's letters.
      source_path: path of the producer.
      target_path: path of the reader.
      times: executions in a step.
      unit: the rematerialization unit of the reader; empty outside of all units.
    """

    source: Tensor
    target: Tensor
    source_path: str
    target_path: str
    times: int = 1
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step for the cost model.

    Attributes:
      einsums: einsums and lookups, in the order of computation.
      flows: tensors that layers pass to each other.
      weights: all weights.
      moments: optimizer moments of each weight, by the weight's path.
      layer_paths: paths of all layers.
      inputs: bytes of a batch.
    """

    einsums: tuple[Einsum, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: dict[str, tuple[VariableSpec, ...]]
    layer_paths: tuple[str, ...]
    inputs: int = 0
