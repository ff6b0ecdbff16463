"""Gather dispatch: moves rows by index in the forward and the backward pass.

A slot holds at most one token, and a token fills at most one slot for each of its K assignments.
The gradient of a gather is therefore also a gather, and no activations are scattered.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.moe.dispatches.dispatch import BufferDispatch, Buffers
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting, Routing, TokenChoiceRouting
from lingvo_gshard.sharding import annotate


class Permutation:
    """Moves the rows of tokens to their slots and the rows of slots back to their tokens.

    It works on tensors [S,M], or on [G,S,M] within each group.
    """

    def __init__(
        self, slots_of_tokens: Sequence[tf.Tensor], num_slots: int, zero_empty: bool = True
    ):
        """Builds the inverse index.

        Args:
          slots_of_tokens: for each of the K assignments, the slot of each token, int32 [S] or
            [G,S]; `num_slots` if the token has no slot.
          num_slots: the number of slots (in each group).
          zero_empty: whether empty slots get zeros. Otherwise they get the row of some token, which
            is faster.
        """
        self._zero_empty = zero_empty
        self._slots = list(slots_of_tokens)
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
        """Returns [slots,M] (or [G,slots,M]): the row of each slot's token; see `zero_empty`.

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
        return rows_at(x, self._token_of_slot, self._zero_empty)

    def _rows_of_tokens(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows of tokens' slots, one tensor for each assignment; zeros if no slot."""
        return [rows_at(rows, slots) for slots in self._slots]

    def _gate_of_slot(self, gates: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the gate of the token in each slot; 0 where the slot is empty."""
        *groups, _ = gates[0].shape.as_list()
        flat = tf.reshape(tf.stack(gates, -2), [*groups, self._entries])
        flat = tf.pad(flat, [*[[0, 0]] * len(groups), [0, 1]])
        return tf.gather(flat, self._entry_of_slot, batch_dims=len(groups))


def rows_at(x: tf.Tensor, index: tf.Tensor, zero_missing: bool = True) -> tf.Tensor:
    """Returns rows [N,M] or [G,N,M] of x.

    XLA computes the zeros with the gather. A row of zeros at the end of x would be a copy of x.

    Args:
      x: the rows, [S,M] or [G,S,M].
      index: int32 [N] or [G,N], the places of the wanted rows; S where there is none.
      zero_missing: whether a row that is not there is zero; otherwise it is the last row.
    """
    count = x.shape[-2]
    rows = tf.gather(x, tf.minimum(index, count - 1), batch_dims=index.shape.rank - 1)
    if not zero_missing:
        return rows
    return tf.where((index < count)[..., tf.newaxis], rows, tf.zeros([], x.dtype))


class GatherDispatch(BufferDispatch):
    """Moves rows by index. No tensor [G,S,E,C] is built."""

    def buffers(self, routing: Routing, dtype: tf.DType) -> Buffers:
        """Returns the buffers of either kind of routing."""
        if isinstance(routing, ExpertChoiceRouting):
            return _ExpertChoiceBuffers(routing)
        return _TokenChoiceBuffers(routing)


class _TokenChoiceBuffers(Buffers):
    """A slot holds at most one token; a token fills at most one slot for each assignment."""

    def __init__(self, routing: TokenChoiceRouting):
        self._experts, self._capacity = routing.num_experts, routing.capacity
        self._slots = routing.num_experts * routing.capacity
        slot_of_token = [
            tf.where(a.kept_GS, a.expert_GS * routing.capacity + a.position_GS, self._slots)
            for a in routing.assignments
        ]
        self._gates = [a.gate_GS for a in routing.assignments]
        self._permutation = Permutation(slot_of_token, self._slots)

    def dispatch(self, x_GSM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        shape = (x_GSM.shape[0], self._experts, self._capacity, x_GSM.shape[-1])
        return annotate(tf.reshape(self._permutation.permute(x_GSM), shape), f"GEC{row}")

    def combine(self, y_GECM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs."""
        y_rows = tf.reshape(y_GECM, (y_GECM.shape[0], self._slots, y_GECM.shape[-1]))
        return annotate(self._permutation.unpermute(y_rows, self._gates), f"GS{row}")


class _ExpertChoiceBuffers(Buffers):
    """Each slot stores the index of its token. A token may fill any number of slots.

    Combine sums a token's outputs. Dispatch and combine are each other's gradient.
    """

    def __init__(self, routing: ExpertChoiceRouting):
        self._experts, self._capacity = routing.num_experts, routing.capacity
        self._groups, self._tokens = routing.is_taken_GS.shape.as_list()
        shape = (self._groups, routing.num_experts * routing.capacity)
        self._token_of_slot = tf.reshape(routing.token_of_slot_GEC, shape)
        self._gate_of_slot = tf.reshape(routing.gate_of_slot_GEC, shape)

    def dispatch(self, x_GSM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""

        @custom_gradient
        def move(x_GSM: tf.Tensor):
            return self._rows_of_slots(x_GSM), self._sum_by_token

        shape = (self._groups, self._experts, self._capacity, x_GSM.shape[-1])
        return annotate(tf.reshape(move(x_GSM), shape), f"GEC{row}")

    def combine(self, y_GECM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs."""
        slots = self._experts * self._capacity
        y_rows = tf.reshape(y_GECM, (self._groups, slots, y_GECM.shape[-1]))

        @custom_gradient
        def move(y_rows: tf.Tensor, gate: tf.Tensor):
            weight = tf.cast(gate, y_rows.dtype)[..., None]

            def gradient(d_out: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                d_rows = self._rows_of_slots(d_out)
                d_gate = tf.reduce_sum(tf.cast(d_rows * y_rows, tf.float32), -1)
                return d_rows * weight, d_gate

            return self._sum_by_token(y_rows * weight), gradient

        return annotate(move(y_rows, self._gate_of_slot), f"GS{row}")

    def _rows_of_slots(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the row of each slot's token, zeros where the slot is empty."""
        return rows_at(x_GSM, self._token_of_slot)

    def _sum_by_token(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: for each token, the sum of the rows in its slots."""
        group = tf.broadcast_to(tf.range(self._groups)[:, None], self._token_of_slot.shape)
        index = tf.stack([group, self._token_of_slot], -1)
        zeros = tf.zeros((self._groups, self._tokens + 1, rows.shape[-1]), rows.dtype)
        return tf.tensor_scatter_nd_add(zeros, index, rows)[:, : self._tokens]
