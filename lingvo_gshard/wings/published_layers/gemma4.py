"""Layers of Gemma 4: experts beside a feed-forward layer, and outputs with a factor.

https://ai.google.dev/gemma/docs/core/model_card_4
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core import SCALE, NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.layers import MixtureOfExperts, RMSNorm, TokenChoiceRouting, TransformerLayer
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter

LOCAL_LETTERS = {"o": "the only factor of a layer"}

_ONE = initializers.constant(1.0)
_NORMS = ("expert_norm", "expert_output_norm", "shared_norm", "shared_output_norm")


class NormalizedRouter(GroupLimitedRouter):
    """A `TopKRouter` of normalized tokens, over sqrt(M). Gates have a factor for each expert."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("norm", RMSNorm.params(), "Params of the norm of the tokens.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_child("norm", self.p.norm.copy().set(model_dim=self.p.model_dim))
        sizes = {"E": self.p.num_experts}
        self.create_variable("gate_scale", "E", sizes, _ONE, unsplit="E", role=SCALE)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        x_GSM = self.norm.fprop(theta.norm, x_GSM) * self.p.model_dim**-0.5
        routing = super().fprop(theta, x_GSM, mask_GS, ids_GS)
        scaled, scale_E = [], tf.cast(theta.gate_scale, tf.float32)
        for each in routing.assignments:
            factor_GSE = tf.one_hot(each.expert_GS, self.p.num_experts) * scale_E
            gate_GS = each.gate_GS * tf.reduce_sum(factor_GSE, -1)
            scaled.append(dataclasses.replace(each, gate_GS=gate_GS))
        return dataclasses.replace(routing, assignments=tuple(scaled))


class ExpertsBeside(MixtureOfExperts):
    """A sum of routed experts and a shared one, each between norms. The router has its own norm."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("norm", RMSNorm.params(), "Params of the norms.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not p.shared_hidden_dim or p.shared_combination != "sum":
            raise UserError(
                f"{path}.shared_hidden_dim: {p.shared_hidden_dim} with {path}.shared_combination="
                f"{p.shared_combination!r}; a size above 0 and 'sum' were expected"
            )
        for name in _NORMS:
            self.create_child(name, p.norm.copy().set(model_dim=p.model_dim))

    def _normalize(self, name: str, theta: NestedMap, x: tf.Tensor, layout: str) -> tf.Tensor:
        return annotate(getattr(self, name).fprop(theta[name], x), layout)

    def gated(self, theta: NestedMap, routing: Any, x_GSM: tf.Tensor) -> tuple[Any, tf.Tensor]:
        x_GSM = self._normalize("expert_norm", theta, x_GSM, "GSM")
        return super().gated(theta, routing, x_GSM)

    def finish(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
    ) -> tf.Tensor:
        h_BLM = self._normalize("shared_norm", theta, x_BLM, "BLM")
        h_BLM = self.shared.fprop(theta.shared, h_BLM, mask_BL)
        h_BLM = self._normalize("shared_output_norm", theta, h_BLM, "BLM")
        return self.observe(h_BLM + self._normalize("expert_output_norm", theta, y_BLM, "BLM"))


class ScaledLayer(TransformerLayer):
    """A Transformer layer whose output has a factor that training does not change.

    `ExpertsBeside` have norms of their input, so that the layer has none before them.
    """

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_variable("output_scale", "o", {"o": 1}, _ONE, role=SCALE, is_frozen=True)
        self._has_own_norms = isinstance(self.feed_forward, ExpertsBeside)
        if self._has_own_norms and self.p.norm_position in ("before", "both"):
            del self._children["feed_forward_norm"]

    def enter_feed_forward(
        self, theta: NestedMap, x: tf.Tensor, entered_attention: tf.Tensor
    ) -> tf.Tensor:
        return x if self._has_own_norms else super().enter_feed_forward(theta, x, entered_attention)

    def add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        x = super().add(name, theta, x, h)
        return self.scaled(theta, x) if name == "feed_forward" else x

    def scaled(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns the output of the layer for the sum x of its sublayers."""
        return x * tf.cast(theta.output_scale, x.dtype)
