"""Rows of a table by number, with a gradient that is summed in float32."""

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.sharding.partitioning import current_partitioning


def rows_of(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a table [V,...] for integer ids of any shape, in float32.

    The gradient of a row is a sum over the places where it stands; it is float32 whatever the type
    of the table, which TensorFlow's would take.
    """
    if table.dtype == tf.float32 and not _are_split(ids):
        return tf.gather(table, ids)

    @custom_gradient
    def compute(table: tf.Tensor):
        def gradient(d_rows: tf.Tensor) -> tf.Tensor:
            sums = tf.math.unsorted_segment_sum(d_rows, ids, table.shape[0])
            return tf.cast(sums, table.dtype)

        return tf.cast(tf.gather(table, ids), tf.float32), gradient

    return compute(table)


def _are_split(ids: tf.Tensor) -> bool:
    """Whether ids [B,L] are by L: TensorFlow's gradient makes one dimension of the two."""
    current = current_partitioning()
    if current is None or ids.shape.rank != 2:
        return False
    return current.parts(current.split("BL", path=context.layer_path())[1]) > 1
