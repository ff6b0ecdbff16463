"""Rows of tokens sorted by expert, and the experts' work on them."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.dispatches.blocks import Blocks, BlockSizes, Loads
from lingvo_gshard.layers.moe.dispatches.places_of_rows import PlacesOfRows
from lingvo_gshard.layers.moe.experts import Experts


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
        slots = rows + sizes.whole
        places = PlacesOfRows(tf.where(self._expert_KT < num_experts, self.place_KT, slots), slots)
        blocks = Blocks(experts.one, theta, Loads.of(self.load_E), sizes)
        return places.collect(blocks.run(places.fill(x_TM)), gate_KT)
