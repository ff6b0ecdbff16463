"""Relative position bias: a learned bias for each bucket of distances, added to the logits.

Raffel et al. 2019, arXiv 1910.10683, section 2.1. A distance is the position of a key in its row
minus the position of a query. Within a segment this is the distance within the sentence. Other
segments are masked.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.core.layer import BIAS
from lingvo_gshard.layers.products import lookup
from lingvo_gshard.sharding import annotate

LOCAL_LETTERS = {"b": "buckets of distances"}


class DistanceBuckets(msgspec.Struct, frozen=True):
    """Assigns distances to buckets. Raffel et al. 2019, arXiv 1910.10683, section 2.1.

    A distance is the position of a key minus the position of a query. Half of the buckets hold a
    single distance each. The others hold ranges that grow by a constant factor, and the last one
    also holds all distances from `max_distance` on. Without causality, half of the buckets are for
    keys before the query, and half for keys after it.

    Attributes:
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


def check(p: Params, path: str) -> None:
    """Checks the relative-bias options of an attention.

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
    exact = DistanceBuckets(buckets, max_distance, is_causal).exact
    if max_distance <= exact:
        raise UserError(
            f"{distance_name}: {max_distance}; more than {exact} was "
            f"expected, the distances that have a bucket of their own with {buckets_name} {buckets}"
        )


@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """A learned bias of the logits.

    It can be an element of a `tf.nest` structure; its tensors are then the leaves.

    Attributes:
      table_bN: the bias of each bucket and head.
      bias_NLK: float32, the bias of each query and key; None if it is not computed yet.
    """

    buckets: DistanceBuckets
    table_bN: tf.Tensor
    bias_NLK: tf.Tensor | None = None

    def at(self, distances_LK: tf.Tensor) -> RelativeBias:
        """Returns this bias with `bias_NLK`.

        Args:
          distances_LK: int32, position of each key minus position of each query.
        """
        if self.bias_NLK is not None:
            return self
        # If there are as many rows as positions, XLA would compute a part of L on each device, as
        # it does with rows, and gather the biases.
        bias_LKN = lookup(self.table_bN, annotate(bucket_of(distances_LK, self.buckets), "LK"))
        bias_NLK = annotate(tf.transpose(bias_LKN, (2, 0, 1)), "NLK")
        return dataclasses.replace(self, bias_NLK=bias_NLK)

    def of_first_keys(self, count: int) -> RelativeBias:
        """Returns the bias of the first `count` keys, cut from `bias_NLK`."""
        assert self.bias_NLK is not None
        return dataclasses.replace(self, bias_NLK=self.bias_NLK[..., :count])

    def __tf_flatten__(self) -> tuple[DistanceBuckets, tuple[tf.Tensor, ...]]:
        """Splits the bias into its buckets and its tensors, for `tf.nest`."""
        more = () if self.bias_NLK is None else (self.bias_NLK,)
        return self.buckets, (self.table_bN, *more)

    @classmethod
    def __tf_unflatten__(cls, buckets: DistanceBuckets, tensors: tuple) -> RelativeBias:
        """Reverses `__tf_flatten__`."""
        return cls(buckets, *tensors)


def bucket_of(distances: tf.Tensor, buckets: DistanceBuckets) -> tf.Tensor:
    """Returns the int32 bucket of each distance, in the shape of `distances`.

    Args:
      distances: int32 positions of keys minus positions of queries.
    """
    most = buckets.max_distance
    # Distances beyond the largest share its bucket.
    table = tf.constant(buckets.of(np.arange(-most, most + 1)))
    return tf.gather(table, tf.clip_by_value(distances, -most, most) + most)


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
    def fprop(self, theta: NestedMap) -> RelativeBias:
        """Returns the bias, as a table."""
        p = self.p
        return RelativeBias(DistanceBuckets(p.buckets, p.max_distance, p.is_causal), theta.table)
