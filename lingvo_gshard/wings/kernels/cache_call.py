"""CacheCall: the static arguments of attention over a cache, and the blocks of slots it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from lingvo_gshard.core import jax, jnp


class CacheCall(msgspec.Struct, frozen=True):
    """The static arguments of the attention of one new token of each row to a ring of slots.

    Attributes:
      logit_cap: c of c tanh(q k / c); 0 disables it.
      has_sinks: whether each head has the logit of a key without a value.
      has_values: whether values are an array of their own; else the keys are the values, too.
      window: largest distance between the token and a slot; 0 means no limit.
    """

    logit_cap: float = 0.0
    has_sinks: bool = False
    has_values: bool = True
    window: int = 0

    def most_blocks(self, slots: int, block: int) -> int:
        """Returns the largest number of blocks that a row sees."""
        total = -(-slots // block)
        if not self.window:
            return total
        # The token's own slot and the window before it; the ring's last block may be shorter.
        met = (self.window + block - 1) // block + 1
        return min(total, met + (slots % block > 0))

    def read_share(self, slots: int, block: int) -> float:
        """Returns the mean share of the slots of a full row that blocks of `block` slots cover."""
        if not self.window:
            return 1.0
        # The window and the token's own slot begin anywhere in a block.
        return min(1.0, (self.window + block) / slots)


@dataclasses.dataclass(frozen=True)
class Cache:
    """The arrays of a call, by name.

    Attributes:
      query: queries [B,N,G,D], already scaled. N counts the heads of the keys, and the G heads of
        queries of a group share one.
      keys: keys [B,N,K,D].
      values: values [B,N,K,D], with a D of their own; the keys if they are the values.
      newest: int32 [1], the slot of the new tokens.
      reach: int32 [B], how many slots before the newest a row sees; -1 if it sees none.
      sinks: float32 logits [N,G]; None if there are none.
    """

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    newest: jax.Array
    reach: jax.Array
    sinks: jax.Array | None

    @classmethod
    def of(cls, call: CacheCall, arrays: Any) -> Cache:
        """Names a call's arrays, which come in the order of the attributes.

        Args:
          arrays: queries [B,N,D], keys, values if the call has them, newest, reach, and sinks [N]
            if the call has them. Here N counts the heads of queries.
        """
        query, keys, *others = arrays
        values = others.pop(0) if call.has_values else keys
        newest, reach, *sinks = others
        batch, heads, dim = query.shape
        shared = keys.shape[1]
        grouped = query.reshape(batch, shared, heads // shared, dim)
        logits = sinks[0].reshape(shared, heads // shared) if sinks else None
        return cls(grouped, keys, values, newest, reach, logits)

    @property
    def slots(self) -> int:
        """Number of slots of a row."""
        return self.keys.shape[2]

    def blocks(self, block: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first visible block of each row and the number of visible blocks, int32 [B].

        The blocks of a row follow each other in the ring, whose last block may have fewer slots.
        """
        total = -(-self.slots // block)
        oldest = jnp.mod(self.newest - jnp.maximum(self.reach, 0), self.slots)
        first, last = oldest // block, self.newest // block
        wraps = oldest > self.newest
        # A row that wraps around within one block sees its newest and its oldest slots there.
        count = jnp.minimum(last - first + 1 + jnp.where(wraps, total, 0), total)
        return first, jnp.where(self.reach < 0, 0, count)
