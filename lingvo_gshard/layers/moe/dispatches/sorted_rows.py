"""Rows of tokens sorted by expert, and the experts' work on them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.dispatches.blocks import Blocks, BlockSizes, Loads
from lingvo_gshard.layers.moe.dispatches.gather import GatherDispatch
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import Choice, Routing


class SortedRows:
    """The rows that tokens are to be computed as, one for each of their choices, by expert.

    expert_KT: int32, of each choice of each token; num_experts or more where there is none.

    place_KT     int32, each row's place among all; those without an expert come last
    load_E       int32, how many rows each expert has
    """

    def __init__(self, expert_KT: tf.Tensor, num_experts: int):
        self._expert_KT = expert_KT
        count = expert_KT.shape.num_elements()
        order = tf.argsort(tf.reshape(expert_KT, [count]), stable=True)
        place = tf.scatter_nd(order[:, tf.newaxis], tf.range(count), [count])
        self.place_KT = tf.reshape(place, expert_KT.shape)
        # One-hot numbers are summed as float32, of which XLA has the fastest sums.
        chosen_KTE = tf.one_hot(expert_KT, num_experts)
        self.load_E = tf.cast(tf.reduce_sum(chosen_KTE, (0, 1)), tf.int32)

    def compute(
        self, x_TM: tf.Tensor, gate_KT: tf.Tensor, experts: Experts, theta: NestedMap
    ) -> tf.Tensor:
        """Returns [T,M]: each token's sum of its experts' outputs times gates, in its type.

        theta: weights of as many experts as there are loads.
        """
        num_experts = self.load_E.shape[0]
        rows = self._expert_KT.shape.num_elements()
        sizes = BlockSizes.of(rows, num_experts)
        is_row_KT = self._expert_KT < num_experts
        slots = [1, rows + sizes.whole]
        mover = mover_of(self.place_KT, gate_KT, is_row_KT, slots, x_TM.dtype)
        blocks = Blocks(experts.one, theta, Loads.of(self.load_E), sizes)
        sorted_RM = mover.dispatch(x_TM[tf.newaxis])[0, 0]
        return mover.combine(blocks.run(sorted_RM)[tf.newaxis, tf.newaxis])[0]


def mover_of(
    slot_KT: tf.Tensor,
    gate_KT: tf.Tensor,
    kept_KT: tf.Tensor,
    slots: Sequence[int],
    dtype: tf.DType,
) -> GatherDispatch:
    """Returns what moves tokens into slots[0] buffers of slots[1] each, and results back."""
    by_choice = [tf.unstack(x[:, tf.newaxis]) for x in (slot_KT, gate_KT, kept_KT)]
    choices = tuple(
        Choice(slot // slots[1], slot % slots[1], gate, kept)
        for slot, gate, kept in zip(*by_choice, strict=True)
    )
    return GatherDispatch(Routing(choices, *slots), dtype)
