"""Table lookup whose gradient is summed in float32."""

from __future__ import annotations

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding.partitioning import parts_of


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns float32 rows of a table, with the dimensions of the ids followed by those of a row.

    The gradient of a row is the sum over all its occurrences. It is computed in float32 even if the
    table has a narrower type, in which TensorFlow's own gradient would sum.

    Args:
      table: the table, [V,...].
      ids: integers in [0, V), of any shape.
    """
    if table.dtype == tf.float32 and not _has_split_positions(ids):
        return tf.gather(table, ids)

    @custom_gradient
    def compute(table: tf.Tensor):
        def gradient(d_rows: tf.Tensor) -> tf.Tensor:
            sums = tf.math.unsorted_segment_sum(d_rows, ids, table.shape[0])
            return tf.cast(sums, table.dtype)

        return tf.cast(tf.gather(table, ids), tf.float32), gradient

    return compute(table)


def _has_split_positions(ids: tf.Tensor) -> bool:
    """Returns whether L of ids [B,L] is split. TensorFlow's gradient would merge B and L."""
    return ids.shape.rank == 2 and parts_of("BL")[1] > 1
