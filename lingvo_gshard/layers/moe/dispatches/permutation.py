"""Permutation: moves rows to slots and back by index, in the forward and the backward pass.

A slot holds at most one token, and a token fills at most one slot for each of its K assignments.
The gradient of a gather is therefore also a gather, and no activations are scattered.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf


class Permutation:
    """Moves the rows of tokens to their slots and the rows of slots back to their tokens.

    It works on tensors [S,M], or on [G,S,M] within each group.
    """

    def __init__(self, slots_of_tokens: Sequence[tf.Tensor], num_slots: int):
        """Builds the inverse index.

        Args:
          slots_of_tokens: for each of the K assignments, the slot of each token, int32 [S] or
            [G,S]; `num_slots` if the token has no slot.
          num_slots: the number of slots (in each group).
        """
        self._slots = list(slots_of_tokens)
        self._batch_dims = self._slots[0].shape.rank - 1
        *groups, tokens = self._slots[0].shape.as_list()
        self._entries = len(self._slots) * tokens
        flat = tf.reshape(tf.stack(self._slots, -2), [*groups, self._entries])
        entry = tf.broadcast_to(tf.range(self._entries), flat.shape)
        index = [flat]
        if groups:
            index = [tf.broadcast_to(tf.range(groups[0])[:, tf.newaxis], flat.shape), flat]
        empty = tf.fill([*groups, num_slots + 1], self._entries)
        # An entry is the index of an (assignment, token) pair. Empty slots get the number of pairs.
        self._entry_of_slot = tf.tensor_scatter_nd_update(empty, tf.stack(index, -1), entry)[
            ..., :num_slots
        ]
        is_filled = self._entry_of_slot < self._entries
        self._token_of_slot = tf.where(is_filled, self._entry_of_slot % tokens, tokens)

    def permute(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [slots,M] (or [G,slots,M]): the row of each slot's token; empty slots are zero.

        Args:
          x: the tokens' rows, [S,M] or [G,S,M].
        """

        @custom_gradient
        def move(x: tf.Tensor):
            def gradient(d_rows: tf.Tensor) -> tf.Tensor:
                return tf.add_n(self._rows_of_tokens(d_rows))

            return self._rows_of_slots(x), gradient

        return move(x)

    def unpermute(self, rows: tf.Tensor, gates: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns [S,M] (or [G,S,M]): each token's gate-weighted sum of the rows in its slots.

        Args:
          rows: the rows in the slots, [slots,M] or [G,slots,M].
          gates: for each of the K assignments, the gate of each token, float32 [S] or [G,S].
        """

        @custom_gradient
        def move(rows: tf.Tensor, *gates: tf.Tensor):
            of_tokens = self._rows_of_tokens(rows)
            weights = [tf.cast(gate, rows.dtype)[..., tf.newaxis] for gate in gates]
            weighted = [row * weight for row, weight in zip(of_tokens, weights, strict=True)]

            def gradient(d_y: tf.Tensor) -> tuple[tf.Tensor, ...]:
                d_gates = [tf.reduce_sum(tf.cast(d_y * row, tf.float32), -1) for row in of_tokens]
                gate_of_slot = tf.cast(self._gate_of_slot(gates), rows.dtype)[..., tf.newaxis]
                return self._rows_of_slots(d_y) * gate_of_slot, *d_gates

            return tf.add_n(weighted), gradient

        return move(rows, *gates)

    def _rows_of_slots(self, x: tf.Tensor) -> tf.Tensor:
        return tf.gather(append_zero_row(x), self._token_of_slot, batch_dims=self._batch_dims)

    def _rows_of_tokens(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows of tokens' slots, one tensor for each assignment; zeros if no slot."""
        padded = append_zero_row(rows)
        return [tf.gather(padded, slots, batch_dims=self._batch_dims) for slots in self._slots]

    def _gate_of_slot(self, gates: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the gate of the token in each slot; 0 where the slot is empty."""
        *groups, _ = gates[0].shape.as_list()
        flat = tf.reshape(tf.stack(gates, -2), [*groups, self._entries])
        flat = tf.pad(flat, [*[[0, 0]] * len(groups), [0, 1]])
        return tf.gather(flat, self._entry_of_slot, batch_dims=self._batch_dims)


def append_zero_row(x: tf.Tensor) -> tf.Tensor:
    """Returns rows [...,S,M] with a final row of zeros, to which empty slots refer."""
    return tf.pad(x, [*[[0, 0]] * (x.shape.rank - 2), [0, 1], [0, 0]])
