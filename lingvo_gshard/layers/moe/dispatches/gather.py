"""Gather dispatch: rows moved by index, forward and backward.

A slot holds at most one token and a token fills at most one slot per choice, so the gradient of a
gather is again a gather: no scatter of activations, no [G,S,E,C].
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.layers.moe.dispatches.buffers import BufferDispatch
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.sharding import annotate

LOCAL_LETTERS = {"x": "choices of all tokens of a group"}


class GatherDispatch(BufferDispatch):
    """Rows moved by index, forward and backward."""

    def __init__(self, routing: Routing, dtype: tf.DType):
        super().__init__(routing, dtype)
        self._experts, self._capacity = routing.num_experts, routing.capacity
        self._groups, self._tokens = routing.choices[0].expert_GS.shape.as_list()
        self._slots = routing.num_experts * routing.capacity
        self._gates = [c.gate_GS for c in routing.choices]
        self._slot_of_token = [
            tf.where(c.kept_GS, c.expert_GS * routing.capacity + c.position_GS, self._slots)
            for c in routing.choices
        ]
        self._token_of_slot, self._choice_of_slot = self._invert()

    def _invert(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Token [G,E*C] in each slot (S where it is empty), and by which choice it came."""
        choices = len(self._slot_of_token)
        entries = self._tokens * choices
        slots_Gx = tf.reshape(tf.stack(self._slot_of_token, -1), (self._groups, entries))
        group_Gx = tf.broadcast_to(tf.range(self._groups)[:, None], (self._groups, entries))
        entry_Gx = tf.broadcast_to(tf.range(entries)[None], (self._groups, entries))
        empty = tf.fill((self._groups, self._slots + 1), entries)
        entry_of_slot = tf.tensor_scatter_nd_update(
            empty, tf.stack([group_Gx, slots_Gx], -1), entry_Gx
        )[:, : self._slots]
        return entry_of_slot // choices, entry_of_slot % choices

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""

        @custom_gradient
        def move(x_GSM: tf.Tensor):
            def gradient(d_rows: tf.Tensor) -> tf.Tensor:
                padded = append_zero_row(d_rows)
                return tf.add_n([take(padded, slot) for slot in self._slot_of_token])

            return take(append_zero_row(x_GSM), self._token_of_slot), gradient

        shape = (self._groups, self._experts, self._capacity, x_GSM.shape[-1])
        return annotate(tf.reshape(move(x_GSM), shape), "GECM")

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of expert outputs times gates."""
        y_rows = tf.reshape(y_GECM, (self._groups, self._slots, y_GECM.shape[-1]))

        @custom_gradient
        def move(y_rows: tf.Tensor, *gates: tf.Tensor):
            padded = append_zero_row(y_rows)
            picked = [take(padded, slot) for slot in self._slot_of_token]
            weights = [tf.cast(gate, self._dtype)[..., None] for gate in gates]
            scaled = [row * weight for row, weight in zip(picked, weights, strict=True)]

            def gradient(d_out: tf.Tensor):
                d_gates = [tf.reduce_sum(tf.cast(d_out * p, tf.float32), -1) for p in picked]
                d_rows = take(append_zero_row(d_out), self._token_of_slot)
                return d_rows * tf.cast(self._gate_of_slot(gates), self._dtype)[..., None], *d_gates

            return tf.add_n(scaled), gradient

        return annotate(move(y_rows, *self._gates), "GSM")

    def _gate_of_slot(self, gates: tuple[tf.Tensor, ...]) -> tf.Tensor:
        """The gate [G,E*C] of the token in each slot; 0 where it is empty."""
        flat = tf.reshape(tf.stack(gates, -1), (self._groups, -1))
        flat = tf.pad(flat, [[0, 0], [0, len(gates)]])
        index = self._token_of_slot * len(gates) + self._choice_of_slot
        return tf.gather(flat, index, batch_dims=1)


def append_zero_row(x_GSM: tf.Tensor) -> tf.Tensor:
    """The row that 'no token' and 'no slot' point at."""
    return tf.pad(x_GSM, [[0, 0], [0, 1], [0, 0]])


def take(rows: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """The rows [G,X,M] that an index [G,X] names, in each group its own."""
    return tf.gather(rows, index, batch_dims=1)
