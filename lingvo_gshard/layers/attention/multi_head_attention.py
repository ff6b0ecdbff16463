"""MultiHeadAttention: the base class of self-attention and cross-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import cached
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.heads import heads_first
from lingvo_gshard.layers.attention.kernel import AttentionKernel
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.bias import add_bias
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.products import multiply, store
from lingvo_gshard.sharding import annotate


class MultiHeadAttention(Layer):
    """softmax(q k / sqrt(D) + bias) v over N heads. Vaswani et al. 2017, arXiv 1706.03762, 3.2.

    This is the base class of SelfAttention and CrossAttention. It owns the weights, and delegates
    the attention itself to a kernel.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("num_heads", 0, "Size of N.", minimum=1)
        p.define("head_dim", 0, "Size of D; 0 for M / N.", minimum=0)
        p.define(
            "dropout_rate",
            0.0,
            "Fraction of the attention weights dropped in training.",
            minimum=0,
            below=1,
        )
        p.define(
            "num_key_value_heads",
            0,
            "Number of heads of keys and values, each shared by consecutive heads of queries "
            "(arXiv 2305.13245, section 2.2); 0 for num_heads.",
            minimum=0,
        )
        p.define("use_bias", False, "Whether queries, keys and values have a bias.")
        p.define("use_output_bias", False, "Whether the output has a bias.")
        p.define("query_scale", 0.0, "Factor of the queries in q k; 0 for 1 / sqrt(D).", minimum=0)
        p.define("qk_norm", False, "Whether queries and keys are normalized (RMSNorm).")
        p.define(
            "query_key_norm",
            RMSNorm.params(),
            "Params of the norms of queries and keys: RMSNorm over D, HeadsRMSNorm over N and D.",
        )
        p.define(
            "logit_cap", 0.0, "c of c tanh(q k / c), in place of q k; 0 disables it.", minimum=0
        )
        p.define(
            "use_sinks",
            False,
            "Whether the softmax of each head has one more logit, a learned one without a value.",
        )
        p.define("kernel", DenseKernel.params(), "Params of the algorithm that attends.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not p.head_dim and p.model_dim % p.num_heads:
            raise ValueError(
                f"{path}.num_heads: {p.num_heads} heads do not divide model_dim {p.model_dim}"
            )
        self.head_dim = p.head_dim or p.model_dim // p.num_heads
        self.key_value_heads = p.num_key_value_heads or p.num_heads
        if p.num_heads % self.key_value_heads:
            raise ValueError(
                f"{path}.num_key_value_heads: {p.num_key_value_heads} does not divide "
                f"{path}.num_heads, {p.num_heads}"
            )
        self.kernel: AttentionKernel = p.kernel.instantiate(path=f"{path}.kernel")
        if p.dropout_rate and not self.kernel.supports_dropout:
            self._refuse_with_kernel("dropout_rate")
        self.query_scale = p.query_scale or 1.0 / math.sqrt(self.head_dim)
        self._create_weights()
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    def _refuse_with_kernel(self, option: str) -> None:
        raise ValueError(
            f"{self.path}.{option}: {self.p.get(option)} is not supported by {self.path}.kernel, "
            f"{type(self.kernel).__name__}; set it to 0 or choose DenseKernel"
        )

    def _create_weights(self) -> None:
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.head_dim}
        project = initializers.glorot_uniform(p.model_dim, p.num_heads * self.head_dim)
        key_value_sizes = {**sizes, "N": self.key_value_heads}
        shared = initializers.glorot_uniform(p.model_dim, self.key_value_heads * self.head_dim)
        self.create_variable("w_query", "MND", sizes, project)
        self.create_variable("w_key", "MND", key_value_sizes, shared)
        self.create_variable("w_value", "MND", key_value_sizes, shared)
        self.create_variable("w_out", "NDM", sizes, project)
        self._create_biases()
        if p.use_sinks:
            zeros = initializers.constant(0.0)
            self.create_variable("sinks", "N", {"N": p.num_heads}, zeros)
        if p.qk_norm:
            self._create_norm("query_norm", p.num_heads)
            self._create_norm("key_norm", self.key_value_heads)

    def _create_biases(self) -> None:
        p, zeros = self.p, initializers.constant(0.0)
        if p.use_bias:
            heads = {"query": p.num_heads, "key": self.key_value_heads}
            for name in ("query", "key", "value"):
                sizes = {"N": heads.get(name, self.key_value_heads), "D": self.head_dim}
                self.create_variable(f"b_{name}", "ND", sizes, zeros)
        if p.use_output_bias:
            self.create_variable("b_out", "M", {"M": p.model_dim}, zeros)

    def _create_norm(self, name: str, heads: int) -> None:
        norm = self.p.query_key_norm.copy().set(model_dim=self.head_dim)
        if "num_heads" in norm:
            norm.num_heads = heads
        self.create_child(name, norm)

    @layer_method
    def decoding_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights for inference: those of one product are joined beforehand."""
        products = self._products()
        joined = {name for names in products for name in names}
        weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
        for names in products:
            w_MND = annotate(_join(theta, names), "MND", "weights")
            weights[_joined(names)] = store(w_MND, "MND", "M")
        weights.w_out = store(theta.w_out, "NDM", "ND")
        return weights

    def _products(self) -> list[tuple[str, ...]]:
        """Returns the names of the weights that are joined for each product with an input.

        Every product is listed, also that of a single weight.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no _products")

    @layer_method
    def _project(self, theta: NestedMap, x_BLM: tf.Tensor, *weights: str) -> tuple:
        """Returns projections [B,L,N,D] of x, one for each weight of the same shape.

        They are computed as one product: several small ones leave the cores of a CPU idle. The
        weights may be those of `decoding_weights`.
        """
        joined = theta.get(_joined(weights))
        w_MND = _join(theta, weights) if joined is None else joined
        projected = tf.split(multiply("BLM,MND->BLND", x_BLM, w_MND), len(weights), axis=-1)
        if self.p.use_bias:
            biases = [theta[f"b_{name.removeprefix('w_')}"] for name in weights]
            projected = [add_bias(x, b_ND) for x, b_ND in zip(projected, biases, strict=True)]
        return tuple(annotate(x_BLND, "BLND") for x_BLND in projected)

    def _normalize(self, name: str, theta: NestedMap, x_BLND: tf.Tensor) -> tf.Tensor:
        """Normalizes queries or keys. Dehghani et al. 2023, arXiv 2302.05442, section 2."""
        if not self.p.qk_norm:
            return x_BLND
        return self.children[f"{name}_norm"].fprop(theta[f"{name}_norm"], x_BLND)

    @layer_method
    def _attend(
        self,
        theta: NestedMap,
        kernel: AttentionKernel,
        query_BLND: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        relative_bias_NLK: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for projected queries, keys and values."""
        query_BNLD = heads_first(query_BLND, "BNLD")
        query_BNLD *= tf.constant(self.query_scale, query_BNLD.dtype)
        dropout_BNLK = None
        if kernel.supports_dropout:
            ones_BNLK = tf.ones((*query_BNLD.shape[:3], keys_BNKD.shape[2]), query_BNLD.dtype)
            dropout_BNLK = self.dropout.fprop(theta.dropout, ones_BNLK)
        mixed_BNLD = kernel.attend(
            query_BNLD,
            keys_BNKD,
            values_BNKD,
            mask,
            self.p.logit_cap,
            relative_bias_NLK,
            dropout_BNLK,
            self._sinks(theta),
        )
        mixed_BLND = annotate(tf.transpose(mixed_BNLD, (0, 2, 1, 3)), "BLND")
        return self.observe(self._output(theta, mixed_BLND))

    @layer_method
    def _output(self, theta: NestedMap, mixed_BLND: tf.Tensor) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for the weighted values of all heads."""
        y_BLM = multiply("BLND,NDM->BLM", mixed_BLND, theta.w_out)
        return add_bias(y_BLM, theta.b_out) if self.p.use_output_bias else y_BLM

    @layer_method
    def _attend_to_slots(
        self,
        theta: NestedMap,
        query_BLND: tf.Tensor,
        slots: NestedMap,
        bias_BLK: tf.Tensor,
        relative_bias_NLK: tf.Tensor | None = None,
        used: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the layer's output [B,L,M] and its weights [B,N,L,K]; see `cached.attend`."""
        query_BLND *= tf.constant(self.query_scale, query_BLND.dtype)
        mixed_BLND, weights_BNLK = cached.attend(
            query_BLND,
            slots,
            bias_BLK,
            self.p.logit_cap,
            relative_bias_NLK,
            used,
            self._sinks(theta),
        )
        return self._output(theta, mixed_BLND), weights_BNLK

    def _sinks(self, theta: NestedMap) -> tf.Tensor | None:
        """Returns the float32 logits of the sinks [N]; None if there are none."""
        return tf.cast(theta.sinks, tf.float32) if self.p.use_sinks else None

    def _count_flops(self, rows: int, queries: int, keys: int) -> int:
        """Returns the floating-point operations of the projections and of both products."""
        p = self.p
        inner = p.num_heads * self.head_dim
        key_value_inner = self.key_value_heads * self.head_dim
        projections = 2 * 2 * rows * (queries * inner + keys * key_value_inner) * p.model_dim
        return projections + 2 * 2 * rows * queries * keys * inner


def _joined(names: Sequence[str]) -> str:
    """Returns the name of the weight that joins several: `w_query_key_value`."""
    return "_".join(["w", *(name.removeprefix("w_") for name in names)])


def _join(theta: NestedMap, names: Sequence[str]) -> tf.Tensor:
    return tf.concat([theta[name] for name in names], axis=-1)
