"""The delta rule of Kimi Delta Attention: each channel of a key has a decay (arXiv 2510.26692).

The state of delta_rule.py decays by a vector a_t [D] instead of a number (section 3):

  S_t = (I - b_t k_t k_t^T) Diag(a_t) S_(t-1) + b_t k_t v_t^T     o_t = S_t^T q_t

The products of keys and queries of a chunk have the decay between their positions in each channel.
exp(sum_t - sum_s) cannot be a product of two factors for a whole chunk: one of them overflows when
channels forget fast. Here each factor is a decay to a position between t and s, so it is at most 1.
Positions near each other have no block boundary between them, and are computed by differences.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.layers import MASKED
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.published_layers import delta_rule

LOCAL_LETTERS = {
    "c": "chunks of a row",
    "p": "blocks of a chunk, or pairs of neighboring blocks",
    "t": "positions of a chunk or a block",
    "s": "positions of a chunk or a block that are read",
    "r": "values of each key head",
    "d": "size of a value",
}

# Most positions of a block whose pairs are computed one by one: the rows of a small matrix unit.
_NEAR = 16


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The values that tokens write and read, as in `delta_rule.Inputs`.

    Attributes:
      log_decay_BLND: logarithms of the decays of the channels of keys, at most 0.
    """

    query_BLND: tf.Tensor
    key_BLND: tf.Tensor
    value_BLNrd: tf.Tensor
    log_decay_BLND: tf.Tensor
    strength_BLNr: tf.Tensor


def run_rows(inputs: Inputs, is_first_BL: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs and the last states of rows, as `delta_rule.run_rows` does.

    Chunks have a few positions more than `size` if blocks do not divide them.
    """
    length = known_sizes(is_first_BL.shape)[1]
    size = min(size, length)
    blocks = 2 ** ((size - 1) // _NEAR).bit_length()
    size = -(-size // blocks) * blocks
    query_cBNtD = delta_rule.chunks(inputs.query_BLND, "BLND", size)
    key_cBNtD = delta_rule.chunks(inputs.key_BLND, "BLND", size)
    value_cBNrtd = delta_rule.chunks(inputs.value_BLNrd, "BLNrd", size)
    strength_cBNrt = delta_rule.chunks(inputs.strength_BLNr, "BLNr", size)
    sums_cBNtD = tf.cumsum(delta_rule.chunks(inputs.log_decay_BLND, "BLND", size), -2)
    segment_cBt = delta_rule.segments_in_chunks(is_first_BL, size)
    is_same_cBNts = tf.equal(segment_cBt[..., None], segment_cBt[..., None, :])[:, :, None]

    def products(x_cBNtD: tf.Tensor) -> tf.Tensor:
        found_cBNts = _products(x_cBNtD, key_cBNtD, sums_cBNtD, size // blocks)
        return annotate(tf.where(is_same_cBNts, found_cBNts, 0.0), "cBNts")[:, :, :, None]

    is_old_cBNt1 = tf.equal(segment_cBt, 0)[:, :, None, :, None]
    reads_cBNtD = tf.where(is_old_cBNt1, tf.exp(sums_cBNtD), 0.0)
    left_cBNtD = tf.exp(sums_cBNtD[..., -1:, :] - sums_cBNtD)
    kept_cBNtD = key_cBNtD * tf.where(is_same_cBNts[..., -1, :, None], left_cBNtD, 0.0)
    values = known_sizes(value_cBNrtd.shape)[3]
    parts = delta_rule.Chunks(
        query_cBNtD[:, :, :, None],
        key_cBNtD[:, :, :, None],
        value_cBNrtd,
        strength_cBNrt,
        products(key_cBNtD) * strength_cBNrt[..., None],
        tf.repeat(products(query_cBNtD), values, 3),
        tf.repeat(reads_cBNtD[:, :, :, None], values, 3),
        annotate(tf.repeat(kept_cBNtD[:, :, :, None], values, 3), "cBNrtD"),
    )
    return delta_rule.run_chunks(parts, length)


def run_step(inputs: Inputs, state_BNrDd: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,N,r,d] and the new states, as `delta_rule.run_step` does."""
    decay_BN1D1 = tf.exp(inputs.log_decay_BLND)[:, :, None, :, None]
    return delta_rule.change(inputs, state_BNrDd * decay_BN1D1)


def _products(
    x_cBNtD: tf.Tensor, key_cBNtD: tf.Tensor, sums_cBNtD: tf.Tensor, block: int
) -> tf.Tensor:
    """Returns the sums [c,B,N,t,s] over D of x_t key_s exp(sums_t - sums_s); 0 for s after t.

    Blocks are joined in pairs until one is left. The decay between two blocks is that to the end of
    the first one, times that from there.

    Args:
      sums_cBNtD: sums of the logarithms of decays up to each position.
      block: positions of the first blocks.
    """
    *batch, size, dim = known_sizes(x_cBNtD.shape)
    x, key, sums = (
        tf.reshape(each, [*batch, size // block, block, dim])
        for each in (x_cBNtD, key_cBNtD, sums_cBNtD)
    )
    difference_cBNptsD = sums[..., :, None, :] - sums[..., None, :, :]
    is_earlier_ts1 = (tf.range(block)[:, None] >= tf.range(block))[..., None]
    decay_cBNptsD = tf.exp(tf.where(is_earlier_ts1, difference_cBNptsD, MASKED))
    near = x[..., :, None, :] * key[..., None, :, :] * decay_cBNptsD
    found_cBNpts = annotate(tf.reduce_sum(near, -1), "cBNpts")
    while block < size:
        (_, x), (key, _), (first, second) = (
            tf.unstack(tf.reshape(each, [*batch, -1, 2, block, dim]), axis=-3)
            for each in (x_cBNtD, key_cBNtD, sums_cBNtD)
        )
        end_cBNp1D = first[..., -1:, :]
        later_cBNptD = x * tf.exp(second - end_cBNp1D)
        earlier_cBNpsD = key * tf.exp(end_cBNp1D - first)
        between_cBNpts = einsum("cBNptD,cBNpsD->cBNpts", later_cBNptD, earlier_cBNpsD)
        one, other = tf.unstack(tf.reshape(found_cBNpts, [*batch, -1, 2, block, block]), axis=-3)
        upper = tf.concat([one, tf.zeros_like(one)], -1)
        found_cBNpts = tf.concat([upper, tf.concat([between_cBNpts, other], -1)], -2)
        block *= 2
    return found_cBNpts[:, :, :, 0]
