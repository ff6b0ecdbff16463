"""Rows of tokens sorted by expert, and the experts' computation on them."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.dispatches.expert_blocks import BlockSizes, ExpertBlocks, ExpertRows
from lingvo_gshard.layers.moe.dispatches.permutation import Permutation
from lingvo_gshard.layers.moe.experts import Experts

LOCAL_LETTERS = {"k": "choices of a token"}


class SortedRows:
    """One row for each choice of each token, sorted by expert.

    Attributes:
      position_kT: int32, each row's position in the sorted order. Rows without an expert are last.
      load_E: int32, the number of rows of each expert.
    """

    def __init__(self, expert_kT: tf.Tensor, num_experts: int):
        """Sorts the rows.

        Args:
          expert_kT: int32, the expert of each choice of each token; num_experts or more where there
            is none.
          num_experts: size of E.
        """
        self._expert_kT = expert_kT
        count = expert_kT.shape.num_elements()
        order = tf.argsort(tf.reshape(expert_kT, [count]), stable=True)
        position = tf.scatter_nd(order[:, tf.newaxis], tf.range(count), [count])
        self.position_kT = tf.reshape(position, expert_kT.shape)
        # XLA sums float32 faster than int32.
        chosen_kTE = tf.one_hot(expert_kT, num_experts)
        self.load_E = tf.cast(tf.reduce_sum(chosen_kTE, (0, 1)), tf.int32)

    def compute(
        self,
        x_TM: tf.Tensor,
        gate_kT: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        most_over_even: int = 1,
    ) -> tf.Tensor:
        """Returns [T,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        Args:
          x_TM: the tokens.
          gate_kT: float32, the gate of each choice.
          experts: the experts.
          theta: the weights of the experts of `load_E`.
          most_over_even: how many times as many rows there is room for as balanced loads take.
        """
        num_experts = self.load_E.shape[0]
        rows = self._expert_kT.shape.num_elements()
        sizes = BlockSizes.for_rows(rows, num_experts)
        # The last block may read up to one block past the last row.
        slots = rows + sizes.full
        slot_kT = tf.where(self._expert_kT < num_experts, self.position_kT, slots)
        permutation = Permutation(tf.unstack(slot_kT), slots)
        loads = ExpertRows.for_loads(self.load_E)
        even_rows = -(-rows // most_over_even)
        blocks = ExpertBlocks(experts.compute_one, theta, loads, sizes, even_rows)
        y_rows = blocks.run(permutation.permute(x_TM))
        return permutation.unpermute(y_rows, tf.unstack(gate_kT))
