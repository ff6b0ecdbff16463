"""Relative position bias: a learned bias for each bucket of distances, added to the logits.

A distance is the position of a key in its row minus that of the query. Within a segment this is the
distance within the sentence, and other segments are masked.
"""

import math

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.lookup import rows_of
from lingvo_gshard.sharding import annotate


def check(p: Params, path: str) -> None:
    """Raises ValueError naming the Params of an attention whose buckets or window cannot be."""
    if not p.relative_buckets:
        return
    least = 2 if p.is_causal else 4
    if p.relative_buckets < least or p.relative_buckets % 2:
        raise ValueError(
            f"{path}.relative_buckets: {p.relative_buckets}; an even number of {least} or more was "
            f"expected with {path}.is_causal {p.is_causal}"
        )
    if p.relative_max_distance <= _exact_buckets(p.relative_buckets, p.is_causal):
        raise ValueError(
            f"{path}.relative_max_distance: {p.relative_max_distance} is no more than what half of "
            f"{path}.relative_buckets, {p.relative_buckets}, holds a distance each"
        )


def _exact_buckets(buckets: int, is_causal: bool) -> int:
    return (buckets if is_causal else buckets // 2) // 2


def buckets_of(distances: tf.Tensor, buckets: int, max_distance: int, is_causal: bool) -> tf.Tensor:
    """Returns the int32 bucket of each int32 distance (a key's position less a query's).

    Raffel et al. 2019, arXiv 1910.10683, section 2.1: half of the buckets hold a distance each, the
    others ranges that grow by a factor, the last one all from `max_distance` on. Where queries see
    keys on both sides each side has half of the buckets.
    """
    side = buckets if is_causal else buckets // 2
    exact = _exact_buckets(buckets, is_causal)
    far = tf.maximum(-distances, 0) if is_causal else tf.abs(distances)
    # A table, since logarithms that are whole in theory fall on either side of that in float32.
    within = np.arange(max_distance + 1)
    ratio = np.log(np.maximum(within, exact) / exact) / math.log(max_distance / exact)
    ranges = np.minimum(exact + np.floor(ratio * (side - exact) + 1e-9), side - 1)
    table = np.where(within < exact, within, ranges).astype(np.int32)
    found = tf.gather(tf.constant(table), tf.minimum(far, max_distance))
    return found if is_causal else found + tf.where(distances > 0, side, 0)


def bias_of(table_KN: tf.Tensor, buckets_LK: tf.Tensor) -> tf.Tensor:
    """Returns float32 [N,L,K]: the learned number of each head for each bucket."""
    bias_LKN = rows_of(table_KN, buckets_LK)
    return annotate(tf.transpose(bias_LKN, (2, 0, 1)), "NLK")
