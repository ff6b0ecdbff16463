"""AttentionKernel: one algorithm for softmax(q k + bias) v."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from lingvo_gshard.core import Configurable, Params, Seam, custom_gradient, known_sizes, tf
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.relative_bias import RelativeBias
from lingvo_gshard.layers.dropout import DropoutMask
from lingvo_gshard.sharding import annotate


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions:
    """Options of the softmax over keys that makes attention weights of logits.

    Attributes:
      cap: c of c tanh(q k / c), applied before any bias; 0 disables it.
      relative_bias: learned bias of the logits; None for none.
      dropout: which attention weights [B,N,L,K] are dropped; None for none.
      sinks_N: float32, the logit of a key without a value that every query of a head sees (Xiao et
        al. 2023, arXiv 2309.17453, section 3.3; learned as in gpt-oss); None for none.
    """

    cap: float = 0.0
    relative_bias: RelativeBias | None = None
    dropout: DropoutMask | None = None
    sinks_N: tf.Tensor | None = None


# The softmax of Vaswani et al. 2017, without any option.
PLAIN = SoftmaxOptions()


class FusedAttention(Protocol):
    """Computes attention with kernels of the hardware, where it has one for a call."""

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: SoftmaxOptions,
    ) -> tf.Tensor | None:
        """Returns the attention output [B,N,L,D], as `AttentionKernel.attend` describes.

        None if it cannot compute the call; it records why (core/kernel_use.py).
        """
        ...

    def reads_bias_tables(self) -> bool:
        """Returns whether it computes with a table of learned biases on the platform in use."""
        ...


# Used by programs for a platform in use (sharding/platforms.py).
FUSED_ATTENTION: Seam[FusedAttention] = Seam("fused_attention")


class AttentionKernel(Configurable):
    """Computes softmax(q k + bias) v from projected queries, keys and values.

    A subclass is one algorithm. An attention layer selects it by its `kernel` Params.

    Attributes:
      keys_layout: letters of the keys and values that `attend` takes: "BNKD", or "BNLD" if they
        stay sharded by position.
      supports_relative_bias: whether `attend` takes a learned bias.
      is_vectorizable: whether the stages of a pipeline can compute it as one operation. A kernel
        with a loop of its own cannot.
    """

    keys_layout = "BNKD"
    supports_relative_bias = False
    is_vectorizable = False

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        self.path = path

    @property
    def uses_fused(self) -> bool:
        """Whether generation uses the platform's kernels, where there are any."""
        return True

    def prepare(self, mask: AttentionMask) -> AttentionMask:
        """Precomputes the parts of a mask that the layers sharing it have in common."""
        return mask

    def prepare_bias(self, bias: RelativeBias, distances_LK: tf.Tensor) -> RelativeBias:
        """Precomputes what the layers sharing a learned bias have in common.

        Args:
          distances_LK: int32, position of each key minus position of each query.
        """
        return bias.at(distances_LK)

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: SoftmaxOptions = PLAIN,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], with the D of the values, in the queries' type.

        Keys and values may have fewer heads than queries: consecutive heads of queries then share
        one head of keys and values. The softmax is computed in float32.

        Args:
          query_BNLD: queries, already scaled.
          keys_BNKD: keys, with letters `keys_layout`.
          values_BNKD: values, with letters `keys_layout`. Values may have another D than keys.
          softmax: the options of the softmax. A relative bias needs `supports_relative_bias`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no attend")


def heads_first(x_BKND: tf.Tensor, layout: str = "BNKD") -> tf.Tensor:
    """Returns [B,N,K,D], which both products of attention read without another transposition.

    Args:
      x_BKND: queries, keys or values by position.
      layout: letters of the result. "BNLD" for queries, and for keys and values that stay sharded
        by position.
    """
    return annotate(tf.transpose(x_BKND, (0, 2, 1, 3)), layout)


def weights_shape(query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor) -> list[int]:
    """Returns the shape [B,N,L,K] of the attention weights of queries and keys."""
    return [*known_sizes(query_BNLD.shape)[:3], known_sizes(keys_BNKD.shape)[2]]


def repeat_heads(x_BNKD: tf.Tensor, num_heads: int, layout: str = "BNKD") -> tf.Tensor:
    """Returns keys or values with each head repeated so that there are `num_heads` in all."""
    times = num_heads // x_BNKD.shape[1]
    if times == 1:
        return x_BNKD

    # XLA does not infer the shapes of tf.repeat's own gradient within loops.
    @custom_gradient
    def compute(x_BNKD: tf.Tensor):
        batch, heads, length, head_dim = x_BNKD.shape

        def gradient(d_BNKD: tf.Tensor) -> tf.Tensor:
            grouped = tf.reshape(d_BNKD, [batch, heads, times, length, head_dim])
            return annotate(tf.reduce_sum(grouped, 2), layout)

        return annotate(tf.repeat(x_BNKD, times, axis=1), layout), gradient

    return compute(x_BNKD)
