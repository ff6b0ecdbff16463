"""MultiHeadAttention: the base class of self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import BIAS, NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.layers.attention.attention import Attention
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.products import add_bias, joined_product
from lingvo_gshard.sharding import annotate


class MultiHeadAttention(Attention):
    """An attention with a projection for each of queries, keys and values.

    This is the base class of SelfAttention and CrossAttention, and owns their weights.

    Attributes:
      head_dim: size of D of queries and keys.
      value_dim: size of D of values.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("head_dim", 0, "Size of D; 0 for M / N.", minimum=0)
        p.define(
            "num_key_value_heads",
            0,
            "Number of heads of keys and values, each shared by consecutive heads of queries "
            "(arXiv 2305.13245, section 2.2); 0 for num_heads.",
            minimum=0,
        )
        p.define("use_bias", False, "Whether queries, keys and values have a bias.")
        p.define("qk_norm", False, "Whether queries and keys are normalized (RMSNorm).")
        p.define("query_key_norm", RMSNorm.params(), "Params of the norms of queries and keys.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not p.head_dim and p.model_dim % p.num_heads:
            raise UserError(
                f"{path}.num_heads: {p.num_heads} heads do not divide model_dim {p.model_dim}"
            )
        self.head_dim = p.head_dim or p.model_dim // p.num_heads
        self.value_dim = self.head_dim
        self.key_value_heads = p.num_key_value_heads or p.num_heads
        if p.num_heads % self.key_value_heads:
            raise UserError(
                f"{path}.num_key_value_heads: {p.num_key_value_heads} does not divide "
                f"{path}.num_heads, {p.num_heads}"
            )
        self._create_weights()
        self._create_common(self.head_dim)

    def _create_weights(self) -> None:
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.head_dim}
        project = initializers.glorot_uniform(p.model_dim, p.num_heads * self.head_dim)
        key_sizes = {**sizes, "N": self.key_value_heads}
        value_sizes = {**key_sizes, "D": self.value_dim}
        shared = initializers.glorot_uniform(p.model_dim, self.key_value_heads * self.head_dim)
        self.create_variable("w_query", "MND", sizes, project, inputs="M")
        self.create_variable("w_key", "MND", key_sizes, shared, inputs="M")
        self.create_variable("w_value", "MND", value_sizes, shared, inputs="M")
        out_sizes = {**sizes, "D": self.value_dim}
        self.create_variable("w_out", "NDM", out_sizes, project, inputs="ND")
        if p.use_bias:
            for name, heads in (("query", sizes), ("key", key_sizes), ("value", value_sizes)):
                zeros = initializers.constant(0.0)
                self.create_variable(f"b_{name}", "ND", heads, zeros, role=BIAS)
        if p.qk_norm:
            self._create_norm("query_norm", p.num_heads)
            self._create_norm("key_norm", self.key_value_heads)

    def _create_norm(self, name: str, heads: int) -> None:
        norm = self.p.query_key_norm.copy().set(model_dim=self.head_dim)
        if "num_heads" in norm:
            norm.num_heads = heads
        self.create_child(name, norm)

    def joined_products(self) -> list[tuple[str, ...]]:
        """Returns the names of the weights that are joined for each product with an input.

        The list includes products with a single weight.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no joined_products")

    @layer_method
    def _project(self, theta: NestedMap, x_BLM: tf.Tensor, *weights: str) -> tuple:
        """Returns projections [B,L,N,D] of x, one for each weight. Their sizes of D may differ.

        The projections are computed as one product: several small products leave the cores of a CPU
        idle. `theta` may be the result of `decoding_weights`.
        """
        own = joined_equation = "BLM,MND->BLND"
        joined = theta.get(joined_name(weights))
        if transposed_name(weights) in theta:
            joined, joined_equation = theta[transposed_name(weights)], "BLM,NDM->BLND"
        elif joined is None:
            joined = join(theta, weights)
        sizes = [
            self.head_dim if name in ("w_query", "w_key") else self.value_dim for name in weights
        ]
        projected = joined_product(
            self,
            theta,
            dict.fromkeys(weights, own),
            joined_equation,
            x_BLM,
            joined,
            lambda x_BLND: tf.split(x_BLND, sizes, axis=-1),
        )
        if self.p.use_bias:
            biases = [theta[f"b_{name.removeprefix('w_')}"] for name in weights]
            projected = [add_bias(x, b_ND) for x, b_ND in zip(projected, biases, strict=True)]
        return tuple(annotate(x_BLND, "BLND") for x_BLND in projected)

    def _normalize(self, name: str, theta: NestedMap, x_BLND: tf.Tensor) -> tf.Tensor:
        """Normalizes queries or keys. Dehghani et al. 2023, arXiv 2302.05442, section 2."""
        if not self.p.qk_norm:
            return x_BLND
        return getattr(self, f"{name}_norm").fprop(theta[f"{name}_norm"], x_BLND)


def joined_name(names: Sequence[str]) -> str:
    """Returns the name of the weight that joins several: `w_query_key_value`."""
    return "_".join(["w", *(name.removeprefix("w_") for name in names)])


def transposed_name(names: Sequence[str]) -> str:
    """Returns the name of the weight that joins several with M last: `w_query_key_value_NDM`."""
    return f"{joined_name(names)}_NDM"


def join(theta: NestedMap, names: Sequence[str]) -> tf.Tensor:
    return tf.concat([theta[name] for name in names], axis=-1)
