"""Gather dispatch: moves rows by index in the forward and the backward pass."""

from __future__ import annotations

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.moe.dispatches.buffers import BufferDispatch, Buffers
from lingvo_gshard.layers.moe.dispatches.permutation import Permutation, append_zero_row
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting, Routing, TokenChoiceRouting
from lingvo_gshard.sharding import annotate


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
        return tf.gather(append_zero_row(x_GSM), self._token_of_slot, batch_dims=1)

    def _sum_by_token(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: for each token, the sum of the rows in its slots."""
        group = tf.broadcast_to(tf.range(self._groups)[:, None], self._token_of_slot.shape)
        index = tf.stack([group, self._token_of_slot], -1)
        zeros = tf.zeros((self._groups, self._tokens + 1, rows.shape[-1]), rows.dtype)
        return tf.tensor_scatter_nd_add(zeros, index, rows)[:, : self._tokens]
