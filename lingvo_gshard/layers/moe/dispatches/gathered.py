"""Gathered buffers: devices fill the buffers of their own experts from the tokens of all devices.

Dispatches with capacity send buffers by all-to-alls by default. A token then crosses once for each
of its experts, and so do empty slots. Gathered tokens cross once for each device, and the sums of
their outputs return. That moves less if a token has many experts or buffers much room.

No collective is called. Tensors are annotated for `parts` of the experts, one for each device: the
groups of all parts are one long dimension G. Split over the devices, it has one part on each.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.core.scopes import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.layers.moe.exchange import Compute
from lingvo_gshard.layers.moe.routing import (
    Assignment,
    ExpertChoiceRouting,
    Routing,
    TokenChoiceRouting,
)
from lingvo_gshard.sharding import annotate, axes_of, current_partitioning

LOCAL_LETTERS = {"d": "devices along the axes that split both groups and experts"}


@dataclasses.dataclass(frozen=True)
class GatheredBuffers:
    """The buffers of one layer, in parts.

    Attributes:
      parts: devices along the mesh axes that split both G and E.
    """

    num_experts: int
    parts: int

    @classmethod
    def for_partitioning(cls, num_experts: int) -> GatheredBuffers:
        """Returns the buffers for the current partitioning; they have one part on one device."""
        current = current_partitioning()
        if current is None:
            return cls(num_experts, 1)
        (groups,), (experts,) = axes_of("G"), axes_of("E")
        return cls(num_experts, current.parts([axis for axis in experts if axis in groups]))

    @property
    def _experts_of_part(self) -> int:
        return -(-self.num_experts // self.parts)

    def gather(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the tokens of all groups, once for each part: [dG,S,M]."""
        return _transposed_by(x_GSM, self._copied, self._added)

    def scatter(self, y_GSM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M], the sums over the parts [dG,S,M]."""
        return _transposed_by(y_GSM, self._added, self._copied)

    def gather_routing(self, routing: Routing) -> Routing:
        """Returns the routing of the groups of all parts, each to the experts of its part."""
        if isinstance(routing, ExpertChoiceRouting):
            return dataclasses.replace(
                routing,
                token_of_slot_GEC=self._slots(
                    routing.token_of_slot_GEC, known_sizes(routing.is_taken_GS.shape)[1]
                ),
                gate_of_slot_GEC=self._slots(routing.gate_of_slot_GEC, 0),
                is_taken_GS=self._copied(routing.is_taken_GS),
                num_experts=self._experts_of_part,
            )
        assert isinstance(routing, TokenChoiceRouting)
        assignments = tuple(map(self._gather_assignment, routing.assignments))
        return dataclasses.replace(
            routing, assignments=assignments, num_experts=self._experts_of_part
        )

    def _gather_assignment(self, choice: Assignment) -> Assignment:
        local, groups = self._experts_of_part, choice.expert_GS.shape[0]
        first_G1 = tf.repeat(tf.range(self.parts) * local, groups)[:, tf.newaxis]
        expert_GS = self._copied(choice.expert_GS) - first_G1
        kept_GS = self._copied(choice.kept_GS) & (expert_GS >= 0) & (expert_GS < local)
        gate_GS = self.gather(choice.gate_GS)
        return dataclasses.replace(
            choice,
            expert_GS=tf.where(kept_GS, expert_GS, 0),
            position_GS=self._copied(choice.position_GS),
            gate_GS=tf.where(kept_GS, gate_GS, tf.zeros_like(gate_GS)),
            kept_GS=kept_GS,
        )

    def run(self, x_GECM: tf.Tensor, compute: Compute, row: str) -> tf.Tensor:
        """Returns the outputs of the experts for the buffers of all parts [dG,E/d,C,M].

        Args:
          compute: [E,G,C,M] -> [E,G,C,M], the experts.
          row: letter of the last dimension, as in `Exchange.run`.
        """
        merged, local, *rest = known_sizes(x_GECM.shape)
        groups, order = merged // self.parts, [0, 2, 1, 3, 4]
        with tf.name_scope(DISPATCH_SCOPE):
            x_dGECM = tf.reshape(x_GECM, [self.parts, groups, local, *rest])
            x_EGCM = tf.reshape(tf.transpose(x_dGECM, order), [-1, groups, *rest])
            x_EGCM = annotate(x_EGCM[: self.num_experts], f"EGC{row}")
        y_EGCM = compute(x_EGCM)
        with tf.name_scope(COMBINE_SCOPE):
            y_EGCM = tf.pad(y_EGCM, [[0, self.parts * local - self.num_experts], *[[0, 0]] * 3])
            y_dEGCM = tf.reshape(y_EGCM, [self.parts, local, groups, *rest])
            y_GECM = tf.reshape(tf.transpose(y_dEGCM, order), [merged, local, *rest])
            return annotate(y_GECM, f"GEC{row}")

    def _copied(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [dG,S,...]: a copy of [G,S,...] for each part."""
        sizes = known_sizes(x.shape)
        copies = tf.broadcast_to(x[tf.newaxis], [self.parts, *sizes])
        merged = tf.reshape(copies, [self.parts * sizes[0], *sizes[1:]])
        return annotate(merged, "GSM"[: len(sizes)])

    def _added(self, y: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,...]: the sum over the parts, sent in y's type and added in float32."""
        groups, *rest = known_sizes(y.shape)
        layout = "GSM"[: 1 + len(rest)]
        parts = tf.reshape(y, [self.parts, groups // self.parts, *rest])
        return annotate(tf.reduce_sum(annotate(parts, f"d{layout}"), 0), layout)

    def _slots(self, x_GEC: tf.Tensor, empty: int) -> tf.Tensor:
        """Returns [dG,E/d,C], the slots of the experts of each part."""
        groups, experts, capacity = known_sizes(x_GEC.shape)
        missing = self.parts * self._experts_of_part - experts
        x_GEC = tf.pad(x_GEC, [[0, 0], [0, missing], [0, 0]], constant_values=empty)
        x_GdEC = tf.reshape(x_GEC, [groups, self.parts, -1, capacity])
        x_dGEC = tf.transpose(x_GdEC, [1, 0, 2, 3])
        return annotate(tf.reshape(x_dGEC, [self.parts * groups, -1, capacity]), "GEC")


def _transposed_by(x: tf.Tensor, there: Compute, back: Compute) -> tf.Tensor:
    """Returns `there` of x, whose gradient is `back`."""

    @custom_gradient
    def move(x: tf.Tensor):
        return there(x), back

    return cast(tf.Tensor, move(x))
