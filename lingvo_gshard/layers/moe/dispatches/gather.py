"""Gather dispatch: moves rows by index in the forward and the backward pass.

A slot holds at most one token, and a token fills at most one slot for each of its K assignments.
The gradient of a gather is therefore also a gather, and no activations are scattered.
"""

from __future__ import annotations

from lingvo_gshard.core import custom_gradient, tf
from lingvo_gshard.layers.moe.dispatches.dispatch import BufferDispatch, Buffers
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting, Routing, TokenChoiceRouting
from lingvo_gshard.sharding import annotate


class Permutation:
    """Moves the rows of tokens to their slots and the rows of slots back to their tokens.

    It works on tensors [S,M], or on [G,S,M] within each group.
    """

    def __init__(
        self,
        slots_of_tokens: tf.Tensor,
        num_slots: int,
        zero_empty: bool = True,
        entry_of_slot: tf.Tensor | None = None,
        zero_lost: bool = True,
    ):
        """Builds the inverse index.

        Args:
          slots_of_tokens: for each of the K assignments, the slot of each token, int32 [K,S] or
            [K,G,S]; `num_slots` if the token has no slot.
          num_slots: the number of slots (in each group).
          zero_empty: whether empty slots get zeros. Otherwise they get the row of some token, which
            is faster.
          entry_of_slot: the inverse index, if it is known: int32 [slots] or [G,slots], of each slot
            the index of its (assignment, token) pair; K * S if it is empty.
          zero_lost: whether tokens without a slot get zeros. Otherwise they get the row of some
            slot, which takes one pass less on TPUs.
        """
        self._zero_empty, self._zero_lost = zero_empty, zero_lost
        self._slots = slots_of_tokens
        self._has_slot = slots_of_tokens < num_slots
        choices, *_, tokens = slots_of_tokens.shape.as_list()
        self._entries = choices * tokens
        if entry_of_slot is None:
            entry_of_slot = self._inverse(num_slots)
        self._entry_of_slot = entry_of_slot
        is_filled = self._entry_of_slot < self._entries
        self._token_of_slot = tf.where(is_filled, self._entry_of_slot % tokens, tokens)

    def _inverse(self, num_slots: int) -> tf.Tensor:
        """Returns the index of each slot's (assignment, token) pair, by a scatter."""
        flat = self._by_entry(self._slots)
        *groups, entries = flat.shape.as_list()
        index = [flat]
        if groups:
            index = [tf.broadcast_to(tf.range(groups[0])[:, tf.newaxis], flat.shape), flat]
        empty = tf.fill([*groups, num_slots + 1], entries)
        entry = tf.broadcast_to(tf.range(entries), flat.shape)
        found = tf.tensor_scatter_nd_update(empty, tf.stack(index, -1), entry)
        return found[..., :num_slots]

    def _by_entry(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [K,S] or [K,G,S] as [K*S] or [G,K*S]."""
        if x.shape.rank == 3:
            x = tf.transpose(x, (1, 0, 2))
        return tf.reshape(x, [*x.shape[:-2], self._entries])

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

    def unpermute(self, rows: tf.Tensor, gates: tf.Tensor | None) -> tf.Tensor:
        """Returns [S,M] (or [G,S,M]): each token's gate-weighted sum of the rows in its slots.

        Args:
          rows: the rows in the slots, [slots,M] or [G,slots,M].
          gates: for each of the K assignments, the gate of each token, float32 [K,S] or [K,G,S].
            None: all gates are 1.
        """

        @custom_gradient
        def sum_rows(rows: tf.Tensor):
            return tf.add_n(self._rows_of_tokens(rows)), self._rows_of_slots

        @custom_gradient
        def move(rows: tf.Tensor, gates: tf.Tensor):
            weights = tf.unstack(tf.cast(gates, rows.dtype)[..., tf.newaxis])
            of_tokens = self._rows_of_tokens(rows)
            weighted = [row * weight for row, weight in zip(of_tokens, weights, strict=True)]

            def gradient(d_y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                # Both gradients come from one pass over the slots, which are fewer than the rows
                # of all assignments where tokens have no slot.
                d_rows = self._rows_of_slots(d_y)
                d_gate_of_slot = tf.reduce_sum(tf.cast(d_rows * rows, tf.float32), -1)
                gate_of_slot = tf.cast(self._gate_of_slot(gates), rows.dtype)[..., tf.newaxis]
                return d_rows * gate_of_slot, self._of_tokens(d_gate_of_slot)

            return tf.add_n(weighted), gradient

        return sum_rows(rows) if gates is None else move(rows, gates)

    def _rows_of_slots(self, x: tf.Tensor) -> tf.Tensor:
        return rows_at(x, self._token_of_slot, self._zero_empty)

    def _rows_of_tokens(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows of tokens' slots, one tensor for each assignment; see `zero_lost`."""
        pairs = zip(tf.unstack(self._slots), tf.unstack(self._has_slot), strict=True)
        return [rows_at(rows, slots, self._zero_lost, has_slot) for slots, has_slot in pairs]

    def _of_tokens(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the float32 values of tokens' slots, [K,S] or [K,G,S]; 0 if no slot."""
        slots = self._by_entry(tf.minimum(self._slots, values.shape[-1] - 1))
        found = tf.gather(values, slots, batch_dims=slots.shape.rank - 1)
        *groups, _ = found.shape.as_list()
        found = tf.reshape(found, [*groups, self._slots.shape[0], self._slots.shape[-1]])
        if groups:
            found = tf.transpose(found, (1, 0, 2))
        return tf.where(self._has_slot, found, 0.0)

    def _gate_of_slot(self, gates: tf.Tensor) -> tf.Tensor:
        """Returns the gate of the token in each slot; 0 where the slot is empty."""
        flat = self._by_entry(gates)
        last = tf.minimum(self._entry_of_slot, self._entries - 1)
        found = tf.gather(flat, last, batch_dims=flat.shape.rank - 1)
        return tf.where(self._entry_of_slot < self._entries, found, 0.0)


def rows_at(
    x: tf.Tensor, index: tf.Tensor, zero_missing: bool = True, is_there: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns rows [N,M] or [G,N,M] of x.

    XLA computes the zeros with the gather. A row of zeros at the end of x would be a copy of x.

    Args:
      x: the rows, [S,M] or [G,S,M].
      index: int32 [N] or [G,N], the places of the wanted rows; S where there is none.
      zero_missing: whether a row that is not there is zero; otherwise it is the last row.
      is_there: whether `index` is less than S, if that is known.
    """
    count = x.shape[-2]
    rows = tf.gather(x, tf.minimum(index, count - 1), batch_dims=index.shape.rank - 1)
    if not zero_missing:
        return rows
    is_there = index < count if is_there is None else is_there
    return tf.where(is_there[..., tf.newaxis], rows, tf.zeros([], x.dtype))


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
        slot_of_token = tf.stack(
            [
                tf.where(a.kept_GS, a.expert_GS * routing.capacity + a.position_GS, self._slots)
                for a in routing.assignments
            ]
        )
        self._gates = tf.stack([a.gate_GS for a in routing.assignments])
        self._permutation = Permutation(slot_of_token, self._slots)

    def dispatch(self, x_GSM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        shape = (x_GSM.shape[0], self._experts, self._capacity, x_GSM.shape[-1])
        return annotate(tf.reshape(self._permutation.permute(x_GSM), shape), f"GEC{row}")

    def combine(self, y_GECM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs."""
        y_GECM = annotate(y_GECM, f"GEC{row}")
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
