"""Dispatches where experts choose tokens: every slot names its token, a token any number of slots.

A token's outputs, and the gradients of its copies, are added up where they meet. Indices say which,
or products with a one-hot [G,S,E,C].
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.layers.moe.dispatches.buffers import BufferDispatch
from lingvo_gshard.layers.moe.dispatches.gather import append_zero_row, take
from lingvo_gshard.layers.moe.routing import SlotRouting
from lingvo_gshard.sharding import annotate, einsum


class SlotGatherDispatch(BufferDispatch):
    """Rows moved to slots by index and added up at tokens; each is the other's gradient."""

    def __init__(self, routing: SlotRouting, dtype: tf.DType):
        super().__init__(routing, dtype)
        self._groups, self._tokens = routing.taken_GS.shape.as_list()
        self._slots = routing.num_experts * routing.capacity
        shape = (self._groups, self._slots)
        self._token_of_slot = tf.reshape(routing.token_of_slot_GEC, shape)
        self._gate_of_slot = tf.reshape(routing.gate_of_slot_GEC, shape)

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""

        @custom_gradient
        def move(x_GSM: tf.Tensor):
            return take(append_zero_row(x_GSM), self._token_of_slot), self._add_up

        routing = self._routing
        shape = (self._groups, routing.num_experts, routing.capacity, x_GSM.shape[-1])
        return annotate(tf.reshape(move(x_GSM), shape), "GECM")

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of expert outputs times gates."""
        y_rows = tf.reshape(y_GECM, (self._groups, self._slots, y_GECM.shape[-1]))

        @custom_gradient
        def move(y_rows: tf.Tensor, gate: tf.Tensor):
            weight = tf.cast(gate, self._dtype)[..., None]

            def gradient(d_out: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                d_picked = take(append_zero_row(d_out), self._token_of_slot)
                d_gate = tf.reduce_sum(tf.cast(d_picked * y_rows, tf.float32), -1)
                return d_picked * weight, d_gate

            return self._add_up(y_rows * weight), gradient

        return annotate(move(y_rows, self._gate_of_slot), "GSM")

    def _add_up(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: the sum of each token's rows, of those in the slots."""
        group = tf.broadcast_to(tf.range(self._groups)[:, None], self._token_of_slot.shape)
        index = tf.stack([group, self._token_of_slot], -1)
        nothing = tf.zeros((self._groups, self._tokens + 1, rows.shape[-1]), rows.dtype)
        return tf.tensor_scatter_nd_add(nothing, index, rows)[:, : self._tokens]


class SlotEinsumDispatch(BufferDispatch):
    """One-hot einsums, as Zhou et al. 2022 write them (arXiv 2202.09368, section 3.2)."""

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        return einsum("GSEC,GSM->GECM", self._slots(), x_GSM)

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of expert outputs times gates."""
        gate_G1EC = tf.cast(self._routing.gate_of_slot_GEC, self._dtype)[:, None]
        return einsum("GSEC,GECM->GSM", self._slots() * gate_G1EC, y_GECM)

    def _slots(self) -> tf.Tensor:
        """Returns [G,S,E,C]: 1 at every slot and its token, 0 elsewhere."""
        routing = self._routing
        tokens = routing.taken_GS.shape[1]
        return tf.one_hot(routing.token_of_slot_GEC, tokens, axis=1, dtype=self._dtype)
