"""IndexedAttention: latent attention to the keys that an indexer chooses for each query."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import (
    NestedMap,
    Params,
    TokenShape,
    UserError,
    context,
    initializers,
    known_sizes,
    layer_method,
    tf,
)
from lingvo_gshard.layers import (
    MASKED,
    AttentionKernel,
    AttentionMask,
    DenseKernel,
    LayerNorm,
    Sequential,
    TransformerStack,
    heads_first,
    products,
    rotary,
)
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.facts.flops import flops, visible_pairs
from lingvo_gshard.wings.inference.layers import cache_shapes
from lingvo_gshard.wings.inference.layers.cached import Visible
from lingvo_gshard.wings.inference.layers.transformer import around_layers
from lingvo_gshard.wings.published_layers import latent_attention, rotary_pairs

LOCAL_LETTERS = {"q": "rank of queries"}


@dataclasses.dataclass(frozen=True)
class Choices:
    """The biases [B,L,K] that indexers made, by number; None for one that chose all keys."""

    biases: dict[int, tf.Tensor | None] = dataclasses.field(default_factory=dict)


class IndexedAttention(latent_attention.LatentAttention):
    """DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

    An indexer of few small heads scores each key for each query. A query attends to the
    `index_topk` keys with the highest scores, and to keys whose scores are equal to the lowest of
    these. In rows of at most so many positions it attends to all, as LatentAttention does.

    The scores decide which logits are masked. The logits themselves are computed for all keys, so
    rows of more than `index_topk` positions need the memory and the time of dense attention. The
    choice has no gradient, so the indexer's weights are frozen.
    In an `IndexedStack`, a layer without one takes the choice of an earlier layer.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("has_indexer", True, "Whether the layer chooses keys itself. Set by the stack.")
        p.define("chooser", 0, "Number of the layer that chooses. Set by the stack.", minimum=0)
        p.define("index_heads", 0, "Heads of the indexer.", minimum=1)
        p.define("index_dim", 0, "Size of D of the indexer's queries and keys.", minimum=1)
        p.define("index_topk", 2048, "Keys that a query attends to.", minimum=1)
        p.define(
            "index_pairs",
            rotary_pairs.HALVES,
            "The rotary_pairs of the indexer's queries and keys.",
            choices=(rotary_pairs.HALVES, rotary_pairs.NEIGHBORS),
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not p.query_rank:
            raise UserError(f"{path}.query_rank: 0; the indexer reads the queries' latent vector")
        if p.kernel.cls is not DenseKernel:
            raise UserError(
                f"{path}.kernel: {p.kernel.cls.__name__} cannot mask single keys; DenseKernel was "
                "expected"
            )
        kernel = p.kernel.copy().set(use_fused=False)
        self._index_rotation = p.copy().set(rotary_pairs=p.index_pairs)
        self._masking_kernel: AttentionKernel = kernel.instantiate(path=f"{path}.kernel")
        if not p.has_indexer:
            return
        sizes = {"M": p.model_dim, "N": p.index_heads, "D": p.index_dim, "q": p.query_rank}
        from_rank, from_input = map(initializers.fan_in, (p.query_rank, p.model_dim))
        self.create_variable("w_index_query", "qND", sizes, from_rank, is_frozen=True)
        self.create_variable("w_index_key", "MD", sizes, from_input, is_frozen=True)
        self.create_variable("w_index_head", "MN", sizes, from_input, is_frozen=True)
        self.create_child("index_norm", LayerNorm.params().set(model_dim=p.index_dim))

    def _restrict(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        low_BLq: tf.Tensor,
        positions: rotary.TextPositions,
        mask: AttentionMask,
    ) -> tuple[AttentionKernel, AttentionMask]:
        length, chosen_BLK = known_sizes(x_BLM.shape)[1], None
        if self.p.has_indexer and length > self.p.index_topk:
            index_BLD = self.index_keys(theta, x_BLM, positions)["index"][:, 0]
            bias_BLK = mask.bias(length, length)[:, 0]
            chosen_BLK = self.choose(theta, x_BLM, low_BLq, positions, index_BLD, bias_BLK)
        chosen_BLK = self.settle(chosen_BLK)
        if chosen_BLK is None:
            return self.kernel, mask
        return self._masking_kernel, dataclasses.replace(mask, bias_B1LK=chosen_BLK[:, None])

    def settle(self, chosen_BLK: tf.Tensor | None) -> tf.Tensor | None:
        """Returns the choice of the layer's own indexer, or of its chooser if it has none."""
        biases, chooser = context.extension(Choices).biases, self.p.chooser
        if self.p.has_indexer:
            biases[chooser] = chosen_BLK
        if chooser not in biases:
            raise UserError(f"{self.path}.has_indexer: False; True was expected in this stack")
        return biases[chooser]

    @layer_method
    def index_keys(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: rotary.TextPositions
    ) -> dict[str, tf.Tensor]:
        """Returns the indexer's keys of new tokens for the cache: `index`, [B,1,L,D]."""
        if not self.p.has_indexer:
            return {}
        key_BLD = products.multiply("BLM,MD->BLD", x_BLM, theta.w_index_key)
        key_BLD = self.index_norm.fprop(theta.index_norm, key_BLD)
        return {"index": heads_first(self._turned(key_BLD[:, :, None], positions))}

    @layer_method
    def choose(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        low_BLq: tf.Tensor,
        positions: rotary.TextPositions,
        index_BKD: tf.Tensor,
        bias_BLK: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the bias [B,L,K] that also masks the keys that the indexer does not choose.

        Args:
          x_BLM: the tokens that attend.
          low_BLq: latent vectors of their queries.
          bias_BLK: float32 bias of the logits, as without an indexer.
        """
        p = self.p
        query_BLND = products.multiply("BLq,qND->BLND", low_BLq, theta.w_index_query)
        query_BLND = self._turned(query_BLND, positions)
        head_BLN = products.multiply("BLM,MN->BLN", x_BLM, theta.w_index_head)
        return chosen_bias(query_BLND, index_BKD, head_BLN, bias_BLK, p.index_topk)

    def _turned(self, x_BLND: tf.Tensor, positions: rotary.TextPositions) -> tf.Tensor:
        """Returns queries or keys of the indexer with as many rotated dimensions as others have."""
        share = self.p.rotary_dim / self.p.index_dim
        return rotary_pairs.rotate(x_BLND, positions, share, self._index_rotation, self.scaling)


class IndexedStack(TransformerStack):
    """A stack whose layers may take the choice of an earlier layer (arXiv 2603.12201)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("choosers", (), "Number of the layer that chooses for each layer.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        run, start = self.p.execution, self._sequential_first
        begins = run.cls is Sequential or self.p.choosers[start] == start
        if run.cls.splits_shared(run) or not begins:
            raise UserError(
                f"{path}.execution: {run.cls.__name__} with interleaved={run.interleaved} after "
                f"{start} layers; Sequential or Repeat with 1 were expected, from a layer that "
                "chooses"
            )

    def layer_params(self, index: int) -> Params:
        """Returns the Params of layer `index`, with all that the stack sets."""
        layer, chooser = super().layer_params(index), self.p.choosers[index]
        layer.self_attention.set(chooser=chooser, has_indexer=chooser == index)
        return layer

    @layer_method
    def fprop(self, theta: NestedMap, *inputs: Any) -> tf.Tensor:
        """Returns the normalized output [B,L,M]; see the base class."""
        with context.override_extension(Choices, biases={}):
            return super().fprop(theta, *inputs)


@around_layers.register(IndexedStack)
def _(stack: IndexedStack, theta: NestedMap, x_BLM: tf.Tensor) -> Any:
    del stack, theta, x_BLM
    return context.override_extension(Choices, biases={})


def chosen_bias(
    query_BLND: tf.Tensor,
    index_BKD: tf.Tensor,
    head_BLN: tf.Tensor,
    bias_BLK: tf.Tensor,
    count: int,
) -> tf.Tensor:
    """Returns the bias [B,L,K] that also masks all keys but those with the highest scores.

    Args:
      query_BLND: rotated queries of the indexer.
      index_BKD: its keys.
      head_BLN: weights of its heads.
      bias_BLK: float32 bias of the logits, as without an indexer.
      count: keys that a query attends to.
    """
    _, _, heads, dim = known_sizes(query_BLND.shape)
    query_BLND, index_BKD, head_BLN = (
        tf.cast(x, tf.float32) for x in (query_BLND, index_BKD, head_BLN)
    )
    scores_BNLK = tf.nn.relu(einsum("BLND,BKD->BNLK", query_BLND, index_BKD))
    scores_BLK = einsum("BLN,BNLK->BLK", head_BLN, scores_BNLK)
    scores_BLK = scores_BLK / math.sqrt(heads * dim) + bias_BLK
    scores_BLK = tf.stop_gradient(annotate(scores_BLK, "BLK", reserved="N"))
    lowest_BL1 = tf.math.top_k(scores_BLK, count).values[..., -1:]
    return bias_BLK + tf.where(scores_BLK >= lowest_BL1, 0.0, MASKED)


@flops.register(IndexedAttention)
def _(layer: IndexedAttention, shape: TokenShape) -> int:
    """Counts latent attention to all keys, and the indexer."""
    p = layer.p
    if not p.has_indexer:
        return latent_attention.latent_attention_flops(layer, shape)
    inner = p.index_heads * p.index_dim
    weights = p.query_rank * inner + p.model_dim * (p.index_dim + p.index_heads)
    scores = shape.rows * visible_pairs(layer, shape) * (inner + p.index_heads)
    return latent_attention.latent_attention_flops(layer, shape) + 2 * (
        shape.tokens * weights + scores
    )


@cache_shapes.register(IndexedAttention)
def _(layer: IndexedAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Adds `index`, the keys of the indexer."""
    index = {"index": (rows, 1, slots, layer.p.index_dim)} if layer.p.has_indexer else {}
    return latent_attention.latent_shapes(layer, rows, slots) | index


@latent_attention.restrict_slots.register(IndexedAttention)
def _(
    layer: IndexedAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    low_BLq: tf.Tensor,
    positions: rotary.TextPositions,
    visible: Visible,
    slots: Sequence[tf.Tensor],
) -> Visible:
    count, chosen_BLK = sum(known_sizes(block.shape)[-2] for block in slots), None
    if count > layer.p.index_topk:
        index_BKD = tf.reshape(tf.concat(slots, -2), [x_BLM.shape[0], count, layer.p.index_dim])
        chosen_BLK = layer.choose(theta, x_BLM, low_BLq, positions, index_BKD, visible.bias_BLK)
    chosen_BLK = layer.settle(chosen_BLK)
    if chosen_BLK is None:
        return visible
    return dataclasses.replace(visible, bias_BLK=chosen_BLK, ring=None, mask=None)
