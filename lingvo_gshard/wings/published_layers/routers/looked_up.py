"""Routers of DeepSeek-V4: scores sqrt(softplus(logit)), and experts looked up by token ids."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.layers import selection
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.published_layers.routers.sigmoid import SigmoidRouter

LOCAL_LETTERS = {"k": "experts of an id"}


class SoftplusRouter(SigmoidRouter):
    """Sends each token to the k experts with the largest sqrt(softplus(logit)) + selection_bias.

    Gates are the scores, without the bias.
    """

    def _scores(self, logits_GSE: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(tf.nn.softplus(logits_GSE))


class LookupRouter(SoftplusRouter):
    """Sends each token to the k experts that a table has for its id (DeepSeek-V4, section 2.1).

    The table is not trained. The gates of these experts are learned.
    """

    needs_token_ids = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("vocabulary_size", 0, "Number of ids in the table.", minimum=1)
        return p.set(use_selection_bias=False)

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.use_selection_bias:
            raise UserError(f"{path}.use_selection_bias: True; a table selects, so False expected")
        sizes, init = {"V": p.vocabulary_size, "k": p.k}, _Even("constant", 0.0, p.num_experts)
        # float32 holds numbers of experts exactly, whatever the type of other weights.
        self.create_variable(
            "experts_of_ids",
            "Vk",
            sizes,
            init,
            unsplit="V",
            update_rule=lambda table, _: table,
            is_frozen=True,
        )

    @layer_method
    def _select(
        self, theta: NestedMap, scores_GSE: tf.Tensor, ids_GS: tf.Tensor | None
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        if ids_GS is None:
            raise UserError(f"{self.path}: LookupRouter routes by token ids, but none were given")
        experts_GSk = tf.cast(tf.gather(theta.experts_of_ids, ids_GS), tf.int32)
        experts = scores_GSE.shape[-1]
        pairs = [
            (expert_GS, annotate(tf.one_hot(expert_GS, experts), "GSE"))
            for expert_GS in tf.unstack(experts_GSk, axis=-1)
        ]
        return selection.settled(self, pairs)


@dataclasses.dataclass(frozen=True)
class _Even(initializers.Initializer):
    """Gives ids different experts, all experts equally many.

    Attributes:
      experts: number of experts.
    """

    experts: int = 1

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, key: tf.Tensor) -> tf.Tensor:
        del key
        count = shape[-2] * shape[-1]
        numbers = tf.reshape(tf.range(count) % self.experts, shape[-2:])
        return tf.cast(tf.broadcast_to(numbers, shape), dtype)
