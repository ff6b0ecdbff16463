"""A learned bias of logits, by the distance of key and query, also within a kernel for Triton.

The gradient of a bucket's bias is the sum of the gradients of the logits whose distances are in the
bucket. A tile of queries keeps these sums, so that no array of queries by keys is in memory. Few
buckets are in most tiles: the last one holds all large distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lingvo_gshard.core.lazy import jax, jnp


class DistanceBuckets(msgspec.Struct, frozen=True):
    """Assigns distances to buckets. Raffel et al. 2019, arXiv 1910.10683, section 2.1.

    A distance is the position of a key minus the position of a query. Half of the buckets hold a
    single distance each. The others hold ranges that grow by a constant factor, and the last one
    also holds all distances from `max_distance` on. Without causality, half of the buckets are for
    keys before the query, and half for keys after it.

    Attributes:
      count: number of buckets.
      max_distance: all distances from this one on share the last bucket.
      is_causal: whether queries attend only to earlier keys.
    """

    count: int
    max_distance: int
    is_causal: bool

    @property
    def side(self) -> int:
        """Number of buckets for keys on one side of the query."""
        return self.count if self.is_causal else self.count // 2

    @property
    def exact(self) -> int:
        """Number of buckets on one side that hold a single distance."""
        return self.side // 2

    def of(self, distances: np.ndarray) -> np.ndarray:
        """Returns the int32 bucket of each distance, in the shape of `distances`."""
        absolute = np.maximum(-distances, 0) if self.is_causal else np.abs(distances)
        # In float64: float32 rounds some logarithms that are integers to the wrong side.
        ratio = np.log(np.maximum(absolute, self.exact) / self.exact)
        ratio /= math.log(self.max_distance / self.exact)
        ranges = self.exact + np.floor(ratio * (self.side - self.exact) + 1e-9)
        buckets = np.where(absolute < self.exact, absolute, np.minimum(ranges, self.side - 1))
        if not self.is_causal:
            buckets += np.where(distances > 0, self.side, 0)
        return buckets.astype(np.int32)


class DistanceBias(NamedTuple):
    """Bias and bucket of each distance of a call: of the last query to the first key, and so on.

    Attributes:
      values: float32 [N,distances], bias of each head.
      buckets: int32 [distances].
    """

    values: Any
    buckets: Any

    @classmethod
    def of(
        cls, buckets: DistanceBuckets, biases: Any, first_query: int, queries: int, keys: int
    ) -> DistanceBias:
        """Returns the bias of the distances between queries and keys.

        Args:
          buckets: the buckets of distances.
          biases: float32 bias [N,buckets] of each bucket.
          first_query: position of the first query among the keys.
          queries: number of queries.
          keys: number of keys.
        """
        first = -(first_query + queries - 1)
        found = buckets.of(np.arange(first, first + queries + keys - 1))
        return cls(biases[:, found], jnp.asarray(found))


def added_by_bucket(sums: jax.Array, buckets: jax.Array, d_logits: jax.Array) -> jax.Array:
    """Returns the sums of gradients by bucket, after those in a tile are added.

    Args:
      sums: float32, one for each bucket and as many more as make a power of two.
      buckets: int32 [block_q,block_k], the bucket of each logit.
      d_logits: float32 [block_q,block_k], the gradient of each logit.
    """
    places = jnp.arange(sums.shape[0])

    def add(bucket: Any, sums: Any) -> Any:
        found = jnp.where(buckets == bucket, d_logits, 0.0).sum(1).sum(0)
        return sums + jnp.where(places == bucket, found, 0.0)

    least, most = buckets.min(1).min(0), buckets.max(1).max(0)
    return jax.lax.fori_loop(least, most + 1, add, sums)
