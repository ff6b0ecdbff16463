"""Attention: the base class of all attentions."""

from __future__ import annotations

import math

from lingvo_gshard.core import Layer, NestedMap, Params, initializers, layer_method, tf
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.kernel import AttentionKernel, SoftmaxOptions, heads_first
from lingvo_gshard.layers.attention.mask import AttentionMask, Reach
from lingvo_gshard.layers.attention.relative_bias import RelativeBias
from lingvo_gshard.layers.dropout import Dropout, DropoutMask
from lingvo_gshard.layers.products import add_bias, product
from lingvo_gshard.sharding import annotate


class Attention(Layer):
    """softmax(q k / sqrt(D) + bias) v over N heads. Vaswani et al. 2017, arXiv 1706.03762, 3.2.

    A subclass owns the weights that make queries, keys and values. This class delegates the
    attention itself to a kernel, or to `cached` for inference, and makes the output with the
    subclass' weight `w_out` [N,D,M].
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("num_heads", 0, "Size of N.", minimum=1)
        p.define_fraction("dropout_rate", 0.0, "Fraction of attention weights dropped in training.")
        p.define("use_output_bias", False, "Whether the output has a bias.")
        p.define("query_scale", 0.0, "Factor of the queries in q k; 0 for 1 / sqrt(D).", minimum=0)
        p.define("logit_cap", 0.0, "c of c tanh(q k / c) in place of q k; 0: none.", minimum=0)
        p.define(
            "use_sinks", False, "Whether a head's softmax has a learned logit without a value."
        )
        p.define("kernel", DenseKernel.params(), "Params of the algorithm that attends.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.kernel: AttentionKernel = self.p.kernel.instantiate(path=f"{path}.kernel")

    def _create_common(self, query_dim: int) -> None:
        """Creates the weights that all attentions may have; `query_dim` is D of the queries."""
        p, zeros = self.p, initializers.constant(0.0)
        self.query_scale = p.query_scale or 1.0 / math.sqrt(query_dim)
        if p.use_output_bias:
            self.create_variable("b_out", "M", {"M": p.model_dim}, zeros)
        if p.use_sinks:
            self.create_variable("sinks", "N", {"N": p.num_heads}, zeros)
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    @property
    def reach(self) -> Reach:
        """The part of a text that a position attends to."""
        return Reach(self.p.window)

    def _mask_of_rows(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        mask = AttentionMask(segments_BL, is_causal=self.p.is_causal, window=self.p.window)
        return mask if segments_BL is None else self.kernel.prepare(mask)

    @layer_method
    def _attend(
        self,
        theta: NestedMap,
        kernel: AttentionKernel,
        query_BLND: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        relative_bias: RelativeBias | None = None,
        gate_BLND: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for projected queries, keys and values."""
        query_BNLD = heads_first(query_BLND, "BNLD")
        query_BNLD *= tf.constant(self.query_scale, query_BNLD.dtype)
        mixed_BNLD = kernel.attend(
            query_BNLD,
            keys_BNKD,
            values_BNKD,
            mask,
            self.softmax(theta, relative_bias, self.dropout.mask()),
        )
        mixed_BLND = annotate(tf.transpose(mixed_BNLD, (0, 2, 1, 3)), "BLND")
        return self.observe(self.output(theta, mixed_BLND, gate_BLND))

    @layer_method
    def output(
        self, theta: NestedMap, mixed_BLND: tf.Tensor, gate_BLND: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for the weighted values of all heads.

        Args:
          gate_BLND: logits of what the values are multiplied with; None for all of each value.
        """
        if gate_BLND is not None:
            mixed_BLND = annotate(mixed_BLND * tf.nn.sigmoid(gate_BLND), "BLND")
        y_BLM = product(self, theta, "w_out", "BLND,NDM->BLM", mixed_BLND)
        return add_bias(y_BLM, theta.b_out) if self.p.use_output_bias else y_BLM

    def softmax(
        self,
        theta: NestedMap,
        relative_bias: RelativeBias | None,
        dropout: DropoutMask | None = None,
    ) -> SoftmaxOptions:
        """Returns the softmax over keys, with the layer's cap and sinks."""
        sinks_N = tf.cast(theta.sinks, tf.float32) if self.p.use_sinks else None
        return SoftmaxOptions(self.p.logit_cap, relative_bias, dropout, sinks_N)
