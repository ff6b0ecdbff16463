"""Relative position bias: a learned bias for each bucket of distances, added to the logits.

Raffel et al. 2019, arXiv 1910.10683, section 2.1. A distance is the position of a key in its row
minus the position of a query. Within a segment this is the distance within the sentence. Other
segments are masked.
"""

from __future__ import annotations

import math

import numpy as np

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import BIAS, Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.products import lookup
from lingvo_gshard.sharding import annotate

LOCAL_LETTERS = {"b": "buckets of distances"}


def check(p: Params, path: str) -> None:
    """Checks the relative-bias options of an attention.

    Args:
      p: Params of the attention.
      path: path of the attention, for error messages.

    Raises:
      UserError: the number of buckets is odd or too small, or the largest distance is too small.
    """
    if p.relative_buckets:
        names = f"{path}.relative_buckets", f"{path}.relative_max_distance"
        check_buckets(p.relative_buckets, p.relative_max_distance, p.is_causal, *names)


def check_buckets(
    buckets: int, max_distance: int, is_causal: bool, buckets_name: str, distance_name: str
) -> None:
    """Checks the number of buckets and the largest distance.

    Args:
      buckets: number of buckets.
      max_distance: the smallest distance in the last bucket, which all larger ones share.
      is_causal: whether queries attend only to earlier keys.
      buckets_name: path of the number of buckets, for error messages.
      distance_name: path of the distance.

    Raises:
      UserError: the number of buckets is odd or too small, or the largest distance is too small.
    """
    least = 2 if is_causal else 4
    if buckets < least or buckets % 2:
        causal_name = f"{buckets_name.rpartition('.')[0]}.is_causal"
        raise UserError(
            f"{buckets_name}: {buckets}; an even number of {least} or more was "
            f"expected with {causal_name} {is_causal}"
        )
    exact = _exact_buckets(buckets, is_causal)
    if max_distance <= exact:
        raise UserError(
            f"{distance_name}: {max_distance}; more than {exact} was "
            f"expected, the distances that have a bucket of their own with {buckets_name} {buckets}"
        )


def _exact_buckets(buckets: int, is_causal: bool) -> int:
    """Returns the number of buckets on one side that hold a single distance."""
    return (buckets if is_causal else buckets // 2) // 2


def bucket_of(distances: tf.Tensor, buckets: int, max_distance: int, is_causal: bool) -> tf.Tensor:
    """Returns the int32 bucket of each distance, in the shape of `distances`.

    Half of the buckets hold a single distance each. The others hold ranges that grow by a constant
    factor, and the last one also holds all distances from `max_distance` on. Without causality,
    half of the buckets are for keys before the query, and half for keys after it.

    Args:
      distances: int32 positions of keys minus positions of queries.
      buckets: number of buckets.
      max_distance: all distances from this one on share the last bucket.
      is_causal: whether queries attend only to earlier keys.
    """
    side = buckets if is_causal else buckets // 2
    exact = _exact_buckets(buckets, is_causal)
    absolute = tf.maximum(-distances, 0) if is_causal else tf.abs(distances)
    # A float64 table: float32 rounds some logarithms that are integers to the wrong side.
    table_distances = np.arange(max_distance + 1)
    ratio = np.log(np.maximum(table_distances, exact) / exact) / math.log(max_distance / exact)
    ranges = np.minimum(exact + np.floor(ratio * (side - exact) + 1e-9), side - 1)
    table = np.where(table_distances < exact, table_distances, ranges).astype(np.int32)
    bucket = tf.gather(tf.constant(table), tf.minimum(absolute, max_distance))
    return bucket if is_causal else bucket + tf.where(distances > 0, side, 0)


def bias_of(table_bN: tf.Tensor, buckets_LK: tf.Tensor) -> tf.Tensor:
    """Returns the float32 bias [N,L,K] of each head, given the bucket of each query and key."""
    # If there are as many rows as positions, XLA would compute a part of L on each device, as it
    # does with rows, and gather the biases.
    bias_LKN = lookup(table_bN, annotate(buckets_LK, "LK"))
    return annotate(tf.transpose(bias_LKN, (2, 0, 1)), "NLK")


class SharedRelativeBias(Layer):
    """One learned bias for each head and bucket of distances. T5, arXiv 1910.10683, section 2.1."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("buckets", 0, "Number of distance buckets; 0: no bias.", minimum=0)
        p.define("max_distance", 128, "The smallest distance in the last bucket.", minimum=1)
        p.define("num_heads", 0, "Size of N; set by the stack.", minimum=1)
        p.define("is_causal", False, "Whether all keys are earlier; set by the stack.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        check_buckets(
            p.buckets, p.max_distance, p.is_causal, f"{path}.buckets", f"{path}.max_distance"
        )
        sizes = {"b": p.buckets, "N": p.num_heads}
        self.create_variable("table", "bN", sizes, initializers.constant(0.0), role=BIAS)

    @layer_method
    def fprop(self, theta: NestedMap, distances_LK: tf.Tensor) -> tf.Tensor:
        """Returns the float32 bias [N,L,K].

        Args:
          theta: weights of this layer.
          distances_LK: int32, position of each key minus position of each query.
        """
        p = self.p
        buckets_LK = bucket_of(distances_LK, p.buckets, p.max_distance, p.is_causal)
        return bias_of(theta.table, buckets_LK)
