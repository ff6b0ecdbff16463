"""AttentionCall: the static arguments of an attention, and the rows of whole blocks it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.layers import DistanceBuckets
from lingvo_gshard.wings.kernels.weight_dropout import DropoutOperands

# Stands for the logit of a hidden key. Infinity would make NaN of a row without visible keys.
HIDDEN = -1e30
# The segment of keys that pad a row to whole blocks. No query has it.
_NO_SEGMENT = -1


class AttentionCall(msgspec.Struct, frozen=True):
    """The static arguments of an attention.

    Attributes:
      is_causal: whether a query attends only to keys at its own position and before it.
      window: largest distance between a query and a key; 0 means no limit.
      first_query: position of the first query among the keys.
      logit_cap: c of c tanh(q k / c); 0 disables it.
      has_segments: whether queries and keys have segments. A query attends to keys of its own.
      buckets: the buckets of distances that have a learned bias; None for no such bias.
      has_sinks: whether each head has the logit of a key without a value.
      dropout_rate: fraction of the attention weights that are dropped.
      packed_segments: the most segments of a row that the kernel computes one by one; 0 if it
        computes rows as a whole.
    """

    is_causal: bool = False
    window: int = 0
    first_query: int = 0
    logit_cap: float = 0.0
    has_segments: bool = False
    buckets: DistanceBuckets | None = None
    has_sinks: bool = False
    dropout_rate: float = 0.0
    packed_segments: int = 0

    @property
    def learned(self) -> int:
        """Number of operands that the layer learns, biases and sinks. They come last."""
        return int(self.buckets is not None) + int(self.has_sinks)

    def computed_share(self, queries: int, keys: int, block_q: int, block_k: int) -> float:
        """Returns the share of blocks [block_q,block_k] that positions do not hide."""
        first = np.arange(0, queries, block_q)[:, None] + self.first_query
        last = np.minimum(first + block_q, queries + self.first_query) - 1
        first_key = np.arange(0, keys, block_k)[None]
        last_key = np.minimum(first_key + block_k, keys) - 1
        is_computed = np.ones((len(first), first_key.size), bool)
        if self.is_causal:
            is_computed &= first_key <= last
        if self.window:
            is_computed &= (first - last_key <= self.window) & (first_key - last <= self.window)
        return float(is_computed.mean())

    def hides_all_keys(self, queries: int, keys: int) -> bool:
        """Returns whether positions hide all keys from any query."""
        last_query = self.first_query + queries - 1
        if self.window and last_query - self.window >= keys:
            return True
        if self.is_causal:
            return self.first_query < 0
        return bool(self.window) and self.first_query + self.window < 0


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a call, by name: of jax in the body of a kernel, else of TensorFlow.

    Attributes:
      query: queries [B,N,L,D], already scaled.
      keys: keys [B,N,K,D], maybe with fewer heads.
      values: values [B,N,K,D], with as many heads as the keys.
      segments: int32 segments [B,L] of queries and [B,K] of keys, if the call has them.
      dropout: what decides which weights are dropped; None if the call drops none.
      biases: float32 bias [N,buckets] of the logits of each bucket; None if there is none.
      sinks: float32 logits [N] of the sinks; None if there are none.
    """

    query: Any
    keys: Any
    values: Any
    segments: tuple[Any, ...]
    dropout: DropoutOperands | None
    biases: Any
    sinks: Any

    @classmethod
    def of(cls, call: AttentionCall, arrays: Any) -> Operands:
        """Names a call's arrays, which come in the order of the attributes."""
        query, keys, values, *others = arrays
        sinks = others.pop() if call.has_sinks else None
        biases = others.pop() if call.buckets is not None else None
        count = 2 if call.has_segments else 0
        dropout = DropoutOperands(*others[count:]) if call.dropout_rate else None
        return cls(query, keys, values, tuple(others[:count]), dropout, biases, sinks)

    def padded(self, queries: int, keys: int) -> Operands:
        """Returns the operands with rows of `queries` and `keys` positions.

        A query that pads a row may see anything. No query of the row sees a key that pads it, if
        the call has segments; else the kernel must hide these keys.
        """
        segments, dropout = self.segments, self.dropout
        if segments:
            segments = (pad(segments[0], 1, queries), pad(segments[1], 1, keys, _NO_SEGMENT))
        if dropout is not None:
            dropout = dropout._replace(
                queries=pad(dropout.queries, 0, queries), keys=pad(dropout.keys, 0, keys)
            )
        query, own_keys = pad(self.query, 2, queries), pad(self.keys, 2, keys)
        values = pad(self.values, 2, keys)
        return Operands(query, own_keys, values, segments, dropout, self.biases, self.sinks)


def pad(x: jax.Array, dimension: int, size: int, value: int = 0) -> jax.Array:
    """Returns an array with padding behind one dimension, which then has `size` elements."""
    if x.shape[dimension] == size:
        return x
    padding = [(0, 0)] * x.ndim
    padding[dimension] = (0, size - x.shape[dimension])
    return jnp.pad(x, padding, constant_values=value)
