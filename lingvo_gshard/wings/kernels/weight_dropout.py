"""Dropout of attention weights within a kernel of Pallas: the bits of layers/dropout.py.

A hash of a weight's row-major index in [B,N,L,K] and of the pass' key decides whether the weight
is dropped, as in core/random_numbers.py. The index is the sum of one term for each dimension. A
kernel takes these terms as vectors, so that it needs no array of weights, and devices that have
parts of B, N, L or K need no more than their parts of the vectors.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from lingvo_gshard.core import jax, jnp, random_numbers


class DropoutOperands(NamedTuple):
    """The uint32 operands of a call that drops weights.

    Attributes:
      rows: terms [B] of the indices.
      heads: terms [N].
      queries: terms [L].
      keys: terms [K].
      key: key [2] of the hash.
    """

    rows: Any
    heads: Any
    queries: Any
    keys: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class TileDropout:
    """Dropout of the weights of one tile.

    Attributes:
      rate: fraction of the weights that are dropped.
      kept: bool [block_q,block_k], whether each weight is kept.
    """

    rate: float
    kept: jax.Array

    @classmethod
    def drawn(cls, rate: float, index: jax.Array, key: jax.Array) -> TileDropout:
        """Returns the dropout of the weights with these indices.

        Args:
          rate: fraction of the weights that are dropped.
          index: uint32 [block_q,block_k], index of each weight in [B,N,L,K].
          key: uint32 [2], an array or a reference to one.
        """
        words = hashed(index, key[0], key[1])
        return cls(rate, words >= jnp.uint32(random_numbers.threshold(rate)))

    def applied(self, x: jax.Array) -> jax.Array:
        """Returns the tile's weights, or their gradients, with zeros for what is dropped."""
        return jnp.where(self.kept, x * (1 / (1 - self.rate)), 0.0)


def hashed(values: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns hashes of uint32 numbers by the halves of a key, as `random_numbers.hashed` does."""
    return _hash(_hash(values + first) + second)


def _hash(x: jax.Array) -> jax.Array:
    for shift, factor in random_numbers.HASH_STEPS:
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
