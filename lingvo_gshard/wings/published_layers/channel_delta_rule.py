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

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.layers import MASKED
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.published_layers import delta_rule

LOCAL_LETTERS = {
    "c": "chunks of a row",
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
    """Returns the outputs and the last states of rows, as `delta_rule.run_rows` does."""
    length = known_sizes(is_first_BL.shape)[1]
    size = min(size, length)
    query_cBNtD = delta_rule.chunks(inputs.query_BLND, "BLND", size)
    key_cBNtD = delta_rule.chunks(inputs.key_BLND, "BLND", size)
    value_cBNrtd = delta_rule.chunks(inputs.value_BLNrd, "BLNrd", size)
    strength_cBNrt = delta_rule.chunks(inputs.strength_BLNr, "BLNr", size)
    sums_cBNtD = tf.cumsum(delta_rule.chunks(inputs.log_decay_BLND, "BLND", size), -2)
    segment_cBt = delta_rule.segments_in_chunks(is_first_BL, size)
    is_same_cBNts = tf.equal(segment_cBt[..., None], segment_cBt[..., None, :])[:, :, None]

    def products(x_cBNtD: tf.Tensor) -> tf.Tensor:
        found_cBNts = _products(x_cBNtD, key_cBNtD, sums_cBNtD)
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


def _products(x_cBNtD: tf.Tensor, key_cBNtD: tf.Tensor, sums_cBNtD: tf.Tensor) -> tf.Tensor:
    """Returns the sums [c,B,N,t,s] over D of x_t key_s exp(sums_t - sums_s); 0 for s after t.

    Neither the sums nor their gradient store an array of t, s and D. Only exponents contain
    `sums`, so that the gradient of `sums` is x_t d_x_t - key_t d_key_t.

    Args:
      sums_cBNtD: sums of the logarithms of decays up to each position.
    """

    @custom_gradient
    def compute(x: tf.Tensor, key: tf.Tensor, sums: tf.Tensor) -> tuple:
        def gradient(d_cBNts: tf.Tensor) -> tuple:
            d_x = _weighted(d_cBNts, key, sums)
            # A key is read by later positions. From the end of a chunk, these are earlier ones.
            backward = tf.linalg.matrix_transpose(d_cBNts)[..., ::-1, ::-1]
            d_key = _weighted(backward, x[..., ::-1, :], -sums[..., ::-1, :])[..., ::-1, :]
            return d_x, d_key, x * d_x - key * d_key

        return _joined(x, key, sums), gradient

    return compute(x_cBNtD, key_cBNtD, sums_cBNtD)


def _joined(x_cBNtD: tf.Tensor, key_cBNtD: tf.Tensor, sums_cBNtD: tf.Tensor) -> tf.Tensor:
    """Returns the sums of `_products`, computed for one block of positions t after another."""
    size = known_sizes(x_cBNtD.shape)[-2]
    rows = []
    for start in range(0, size, _NEAR):
        x, key, sums = (
            each[..., start : start + _NEAR, :] for each in (x_cBNtD, key_cBNtD, sums_cBNtD)
        )
        difference_cBNtsD = sums[..., :, None, :] - sums[..., None, :, :]
        # Masked before the exponential: it would overflow for later positions.
        decay_cBNtsD = tf.exp(tf.where(_is_earlier(sums)[..., None], difference_cBNtsD, MASKED))
        row_cBNts = tf.reduce_sum(x[..., :, None, :] * key[..., None, :, :] * decay_cBNtsD, -1)
        if start:
            from_cBNtD, to_cBNsD = _far_decays(sums_cBNtD, start)
            earlier_cBNsD = key_cBNtD[..., :start, :] * to_cBNsD
            far_cBNts = einsum("cBNtD,cBNsD->cBNts", x * from_cBNtD, earlier_cBNsD)
            row_cBNts = tf.concat([far_cBNts, row_cBNts], -1)
        later = size - known_sizes(row_cBNts.shape)[-1]
        rows.append(tf.pad(row_cBNts, [*[[0, 0]] * 4, [0, later]]))
    return annotate(tf.concat(rows, -2), "cBNts")


def _weighted(weights_cBNts: tf.Tensor, x_cBNsD: tf.Tensor, sums_cBNtD: tf.Tensor) -> tf.Tensor:
    """Returns the sums [c,B,N,t,D] over s <= t of weights_ts x_s exp(sums_t - sums_s)."""
    rows = []
    for start in range(0, known_sizes(x_cBNsD.shape)[-2], _NEAR):
        here = slice(start, start + _NEAR)
        x, sums = (each[..., here, :] for each in (x_cBNsD, sums_cBNtD))
        # Unlike the exponents above, so that XLA does not store these for both.
        decay_cBNtsD = tf.exp(-tf.maximum(sums[..., None, :, :] - sums[..., :, None, :], 0.0))
        near_cBNts = tf.where(_is_earlier(sums), weights_cBNts[..., here, here], 0.0)
        row_cBNtD = tf.reduce_sum(near_cBNts[..., None] * x[..., None, :, :] * decay_cBNtsD, -2)
        if start:
            from_cBNtD, to_cBNsD = _far_decays(sums_cBNtD, start)
            far_cBNts, earlier_cBNsD = weights_cBNts[..., here, :start], x_cBNsD[..., :start, :]
            far_cBNtD = einsum("cBNts,cBNsD->cBNtD", far_cBNts, earlier_cBNsD * to_cBNsD)
            row_cBNtD += from_cBNtD * far_cBNtD
        rows.append(row_cBNtD)
    return annotate(tf.concat(rows, -2), "cBNtD")


def _is_earlier(sums_cBNtD: tf.Tensor) -> tf.Tensor:
    """Returns a bool [t,s]: whether s <= t."""
    position_t = tf.range(known_sizes(sums_cBNtD.shape)[-2])
    return position_t[:, None] >= position_t


def _far_decays(sums_cBNtD: tf.Tensor, start: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the decays from the end of the earlier blocks, and the decays up to this end.

    Args:
      start: the first position of the block.

    Returns:
      Decays from the end to each position of the block, and from each earlier position to the end.
    """
    end_cBN1D = sums_cBNtD[..., start - 1 : start, :]
    block_cBNtD = sums_cBNtD[..., start : start + _NEAR, :]
    return tf.exp(block_cBNtD - end_cBN1D), tf.exp(end_cBN1D - sums_cBNtD[..., :start, :])
