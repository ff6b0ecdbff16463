"""A learned bias of logits, by the distance of key and query, also within a kernel for Triton.

The gradient of a bucket's bias is the sum of the gradients of the logits whose distances are in the
bucket. A tile of queries keeps these sums, so that no array of queries by keys is in memory. Few
buckets are in most tiles: the last one holds all large distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.layers import DistanceBuckets


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
          biases: float32 bias [N,buckets] of each bucket.
          first_query: position of the first query among the keys.
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
