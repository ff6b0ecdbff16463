"""A learned bias of logits, by the distance of key and query, within a kernel of Pallas for Triton.

The gradient of a bucket's bias is the sum of the gradients of the logits whose distances are in the
bucket. A tile of queries keeps these sums, so that no array of queries by keys is in memory. Few
buckets are in most tiles: the last one holds all large distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lingvo_gshard.core.lazy import jax, jnp
from lingvo_gshard.kernels.call import AttentionCall, Operands


class DistanceBias(NamedTuple):
    """Bias and bucket of each distance of a call: of the last query to the first key, and so on.

    Attributes:
      values: float32 [N,distances], bias of each head.
      buckets: int32 [distances].
    """

    values: Any
    buckets: Any

    @classmethod
    def of(cls, call: AttentionCall, operands: Operands) -> DistanceBias | None:
        """Returns the bias of a call; None if it has none."""
        if call.buckets is None:
            return None
        queries, keys = operands.query.shape[2], operands.keys.shape[2]
        first = -(call.first_query + queries - 1)
        buckets = call.buckets.of(np.arange(first, first + queries + keys - 1))
        return cls(operands.biases[:, buckets], jnp.asarray(buckets, jnp.int32))


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
