"""Rows sorted by expert, which the experts of one device compute."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, tf
from lingvo_gshard.layers import Experts, Permutation, count_rows, sort_rows
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.dropless import sorted_experts
from lingvo_gshard.wings.dropless.expert_blocks import BlockSizes, ExpertBlocks, ExpertRows

LOCAL_LETTERS = {"k": "choices of a token", "d": "devices along the axes of the experts"}


class SortedRows:
    """One row for each choice of each token, sorted by expert.

    Attributes:
      position_kT: int32, each row's position in the sorted order. Rows without an expert are last.
      load_E: int32, the number of rows of each expert.
    """

    def __init__(self, expert_kT: tf.Tensor, num_experts: int, is_sorted: bool = False):
        """Sorts the rows.

        Args:
          expert_kT: int32, the expert of each choice of each token; num_experts or more where there
            is none.
        """
        expert_r = tf.reshape(expert_kT, [-1])
        self._is_sorted = is_sorted
        self._order_r = position_r = tf.range(expert_r.shape[0])
        if not is_sorted:
            self._order_r, position_r = sort_rows(expert_r, num_experts)
        self.position_kT = tf.reshape(position_r, expert_kT.shape)
        self.load_E = count_rows(expert_kT, num_experts)

    def compute(
        self,
        x_TM: tf.Tensor,
        gate_kT: tf.Tensor | None,
        experts: Experts,
        theta: NestedMap,
        even_rows: int = 0,
        bound: int = 0,
    ) -> tf.Tensor:
        """Returns [T,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        Args:
          gate_kT: float32, the gate of each choice. None: gates are 1, and the output of a token
            with a choice that has no expert is undefined.
          theta: the weights of the experts of `load_E`.
          even_rows: the number of rows with an expert under balanced loads; 0: all rows.
          bound: the number of sorted rows that are computed; 0: all rows. Later ones count as 0.
        """
        num_experts = self.load_E.shape[0]
        count = self.position_kT.shape.num_elements()
        rows = min(bound or count, count)
        even_rows = min(even_rows or rows, rows)
        platform = sorted_experts.platform_for(rows, x_TM.dtype, theta)
        sizes = BlockSizes.for_rows(rows, num_experts)
        if platform:
            slots = kernels.grouped.padded_rows(platform, rows, even_rows, num_experts)
        else:
            # The last block may read up to one block past the last row.
            slots = rows + sizes.full
        load_E = self.load_E
        if rows < count:
            load_E = clip_loads(load_E, rows)
        computed = tf.reduce_sum(load_E)
        slot_kT = tf.where(self.position_kT < computed, self.position_kT, slots)
        # A kernel ignores the rows after the last group.
        order_r = tf.pad(self._order_r[:slots], [[0, max(slots - count, 0)]])
        entry_r = tf.where(tf.range(slots) < computed, order_r, count)
        permutation = Permutation(slot_kT, slots, not platform, entry_r, gate_kT is not None)
        if self._is_sorted:
            x_rows = tf.pad(x_TM[:slots], [[0, max(slots - count, 0)], [0, 0]])
        else:
            x_rows = permutation.permute(x_TM)
        if platform:
            y_rows = sorted_experts.compute_sorted(experts, theta, x_rows, load_E, even_rows)
        else:
            loads = ExpertRows.for_loads(load_E)
            blocks = ExpertBlocks(experts.compute_one, theta, loads, sizes, even_rows)
            y_rows = blocks.run(x_rows)
        if self._is_sorted:
            return tf.pad(y_rows[:count], [[0, max(count - slots, 0)], [0, 0]])
        return permutation.unpermute(y_rows, gate_kT)


def clip_loads(load_dE: tf.Tensor, bound: int) -> tf.Tensor:
    """Returns the loads [...,d,E] of devices' experts without rows beyond a device's bound."""
    before_dE = tf.cumsum(load_dE, axis=-1, exclusive=True)
    return tf.clip_by_value(bound - before_dE, 0, load_dE)
