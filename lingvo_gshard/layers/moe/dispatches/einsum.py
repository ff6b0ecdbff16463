"""Einsum dispatch: products with one-hot tensors [G,S,E,C] (arXiv 2006.16668, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.moe.dispatches.dispatch import BufferDispatch, Buffers
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting, Routing, TokenChoiceRouting
from lingvo_gshard.sharding import einsum


class EinsumDispatch(BufferDispatch):
    """Dispatches and combines by einsums with one-hot tensors, as the paper does."""

    def buffers(self, routing: Routing, dtype: tf.DType) -> Buffers:
        """Returns the buffers of either kind of routing."""
        if isinstance(routing, ExpertChoiceRouting):
            return _ExpertChoiceBuffers(routing, dtype)
        return _TokenChoiceBuffers(routing, dtype)


class _OneHotBuffers(Buffers):
    """Buffers that are filled and read by one-hot tensors [G,S,E,C]."""

    def dispatch(self, x_GSM: tf.Tensor, row: str = "M") -> tf.Tensor:
        return einsum(f"GSEC,GS{row}->GEC{row}", self._dispatch_mask(), x_GSM)

    def combine(self, y_GECM: tf.Tensor, row: str = "M") -> tf.Tensor:
        y_GSM = einsum(f"GSEC,GEC{row}->GS{row}", self._combine_weights(), y_GECM)
        # Selects rows, since weights of 0 are not enough: a norm of the zero row of a dropped token
        # has a gradient that overflows float16. 0 times infinity would then reach all slots.
        return tf.where(self._is_kept()[..., None], y_GSM, tf.zeros_like(y_GSM))

    def _dispatch_mask(self) -> tf.Tensor:
        """Returns [G,S,E,C]: 1 where a token fills a slot, 0 elsewhere."""
        raise NotImplementedError

    def _combine_weights(self) -> tf.Tensor:
        """Returns [G,S,E,C]: the gate where a token fills a slot, 0 elsewhere."""
        raise NotImplementedError

    def _is_kept(self) -> tf.Tensor:
        """Returns whether any expert computes the token, bool [G,S]."""
        raise NotImplementedError


class _TokenChoiceBuffers(_OneHotBuffers):
    def __init__(self, routing: TokenChoiceRouting, dtype: tf.DType):
        self._routing, self._dtype = routing, dtype

    def _dispatch_mask(self) -> tf.Tensor:
        return self._one_hot([tf.cast(a.kept_GS, tf.float32) for a in self._routing.assignments])

    def _combine_weights(self) -> tf.Tensor:
        return self._one_hot([a.gate_GS for a in self._routing.assignments])

    def _is_kept(self) -> tf.Tensor:
        return tf.reduce_any(tf.stack([a.kept_GS for a in self._routing.assignments]), 0)

    def _one_hot(self, weights_GS: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns [G,S,E,C]: each assignment's weight at its token and slot, 0 elsewhere."""
        routing = self._routing
        weights_GSEC = tf.add_n(
            [
                einsum(
                    "GSE,GSC->GSEC",
                    tf.one_hot(assignment.expert_GS, routing.num_experts) * weight_GS[..., None],
                    tf.one_hot(assignment.position_GS, routing.capacity),
                )
                for assignment, weight_GS in zip(routing.assignments, weights_GS, strict=True)
            ]
        )
        return tf.cast(weights_GSEC, self._dtype)


class _ExpertChoiceBuffers(_OneHotBuffers):
    """Buffers for expert choice: Zhou et al. 2022 (arXiv 2202.09368, section 3.2)."""

    def __init__(self, routing: ExpertChoiceRouting, dtype: tf.DType):
        self._routing, self._dtype = routing, dtype

    def _dispatch_mask(self) -> tf.Tensor:
        tokens = self._routing.is_taken_GS.shape[1]
        return tf.one_hot(self._routing.token_of_slot_GEC, tokens, axis=1, dtype=self._dtype)

    def _combine_weights(self) -> tf.Tensor:
        gate_G1EC = tf.cast(self._routing.gate_of_slot_GEC, self._dtype)[:, None]
        return self._dispatch_mask() * gate_G1EC

    def _is_kept(self) -> tf.Tensor:
        return self._routing.is_taken_GS
