"""TokenTask: what tasks whose decoder predicts the next token have in common."""

from __future__ import annotations

import math
from typing import ClassVar

from lingvo_gshard.core import context, initializers, tf
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import LOSS_SCOPE
from lingvo_gshard.layers.attention.dense import soft_cap
from lingvo_gshard.layers.embedding import SinusoidalPositions, Softmax, TokenEmbedding
from lingvo_gshard.layers.losses import CrossEntropy, Objective, cross_entropy, loss_without_logits
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.products import add_bias, product, unrounded
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import TransformerLayer, inherit
from lingvo_gshard.tasks.task import Task


def loss_of_sums(
    sums: CrossEntropy, segments_BL: tf.Tensor, *more_segments: tf.Tensor
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the training loss of a packed batch, and metrics: name -> (value, weight).

    The loss is the smoothed loss of a token that is no padding, in the mean, plus the losses that
    layers reported to the context.

    Args:
      sums: sums of losses over the positions of the batch.
      segments_BL: int32 segments, 0 in padding.
      *more_segments: segments of further arrays, such as the source's, whose tokens are added to
        the metric `tokens`.
    """
    with tf.name_scope(f"{LOSS_SCOPE}/"):
        tokens = tf.maximum(sums.tokens, 1.0)
        current = context.current()
        loss = sums.smoothed / tokens + current.include_losses()
        metrics = NestedMap(current.metrics)
        # A batch of padding alone weighs nothing where batches are averaged.
        metrics.update(
            loss=(loss, sums.tokens),
            cross_entropy=(sums.exact / tokens, sums.tokens),
            accuracy=(sums.correct / tokens, sums.tokens),
            tokens=(count_tokens(segments_BL, *more_segments), tf.ones([])),
        )
        return loss, metrics


def count_tokens(*segments: tf.Tensor) -> tf.Tensor:
    """Returns the number of positions that are no padding, as a float32 scalar."""
    return tf.add_n(
        [tf.reduce_sum(tf.cast(tf.not_equal(each, 0), tf.float32)) for each in segments]
    )


LOCAL_LETTERS = {"m": "model, as the input of a product"}


class FutureToken(Layer):
    """A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    It joins the state of each position with the embedding of the token that was predicted there,
    and runs one Transformer layer. The module uses the embedding and the softmax of the model.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("norm", RMSNorm.params(), "Params of the norms.")
        p.define("layer", TransformerLayer.params(), "Params of the Transformer layer.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        norm = inherit(p.norm, model_dim=p.model_dim)
        for name in ("state_norm", "token_norm", "output_norm"):
            self.create_child(name, norm)
        sizes = {"m": p.model_dim, "M": p.model_dim}
        init = initializers.fan_in(2 * p.model_dim)
        self.create_variable("w_state", "mM", sizes, init, inputs="m")
        self.create_variable("w_token", "mM", sizes, init, inputs="m")
        self.create_child("layer", p.layer)

    @layer_method
    def fprop(
        self, theta: NestedMap, state_BLM: tf.Tensor, token_BLM: tf.Tensor, segments_BL: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the states [B,L,M] for the next module, and what the softmax reads, [B,L,M].

        Args:
          state_BLM: states of the model, or of the module before.
          token_BLM: embedding of the token that the state predicts.
          segments_BL: int32 segments; 0 where there is no token further ahead.
        """
        state_BLM = self.state_norm.fprop(theta.state_norm, state_BLM)
        token_BLM = self.token_norm.fprop(theta.token_norm, token_BLM)
        with unrounded():
            x_BLM = product(self, theta, "w_state", "BLm,mM->BLM", state_BLM)
            x_BLM += product(self, theta, "w_token", "BLm,mM->BLM", token_BLM)
        mask = self.layer.self_attention.mask(segments_BL)
        x_BLM = self.layer.fprop(theta.layer, x_BLM, [mask])
        return x_BLM, self.output_norm.fprop(theta.output_norm, x_BLM)


class TokenTask(Task):
    """Embeds tokens and their positions, runs a causal decoder, and predicts the next token.

    A subclass defines `loss`, and calls the `create_` methods in the order of its children.

    Class attributes:
      EMBEDDING: name of the child that embeds the decoder's tokens. With `tie_softmax` its table is
        also the softmax's weight.
    """

    ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
    EMBEDDING: ClassVar[str] = "embedding"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("decoder", TransformerStack.params(), "Params of the decoder.")
        p.define("positions", SinusoidalPositions.params(), "Params of the position embeddings.")
        p.define("embedding_scale", 0.0, "Factor of the token embeddings; 0: sqrt(M).", minimum=0)
        p.define("tie_softmax", True, "Whether the softmax's weight is the embedding table.")
        p.define("use_logit_bias", False, "Whether the logits have a learned bias.")
        p.define("logit_scale", 1.0, "Factor of the logits.", above=0)
        p.define(
            "logit_cap", 0.0, "c of c tanh(logits / c) in place of the logits; 0: none.", minimum=0
        )
        p.define_fraction("label_smoothing", 0.0, "Probability spread evenly over the vocabulary.")
        p.define(
            "logits_positions",
            0,
            "Positions of a device whose logits training holds at once. 0 decides by size: all, or "
            "2,048 if V is large.",
            minimum=0,
            changes_results=False,
        )
        return p

    def create_embedding(self, name: str, vocabulary_size: int) -> None:
        """Creates a table of token embeddings."""
        embedding = TokenEmbedding.params()
        embedding.set(
            vocabulary_size=vocabulary_size,
            model_dim=self.p.model_dim,
            scale=self.p.embedding_scale,
            is_softmax_weight=self.p.tie_softmax and name == self.EMBEDDING,
        )
        self.create_child(name, embedding)

    def create_positions(self, name: str = "positions") -> None:
        """Creates position embeddings as the child `name`."""
        self.create_child(name, inherit(self.p.positions, model_dim=self.p.model_dim))

    def create_stack(self, name: str) -> None:
        """Creates the stack whose Params have this name."""
        stack = inherit(self.p.get(name), model_dim=self.p.model_dim).set(has_token_ids=True)
        self.create_child(name, stack)

    def create_softmax(self, vocabulary_size: int) -> None:
        """Creates the softmax, unless it shares the weight of the embedding, and its bias."""
        if self.p.use_logit_bias:
            zeros = initializers.constant(0.0)
            self.create_variable("logit_bias", "V", {"V": vocabulary_size}, zeros)
        if not self.p.tie_softmax:
            softmax = Softmax.params()
            softmax.set(vocabulary_size=vocabulary_size, model_dim=self.p.model_dim)
            self.create_child("softmax", softmax)

    def guessing_loss(self) -> float | None:
        """Returns log V, the cross-entropy of a token that is guessed evenly."""
        return math.log(self.shared_embedding.p.vocabulary_size)

    @property
    def activation_dtype(self) -> tf.DType:
        """The type of the activations."""
        return tf.as_dtype(self.p.fprop_dtype or "float32")

    @layer_method
    def embed(
        self,
        name: str,
        theta: NestedMap,
        ids_BL: tf.Tensor,
        positions_BL: tf.Tensor,
        positions: str = "positions",
    ) -> tf.Tensor:
        """Returns the float32 sum of token and position embeddings, cast to the activations.

        Args:
          name: the child that embeds the tokens.
          positions: the child that embeds the positions, if there is one.
        """
        x_BLM = tf.cast(getattr(self, name).fprop(theta[name], ids_BL), tf.float32)
        if positions in self.children:
            embedding = getattr(self, positions)
            x_BLM += tf.cast(embedding.fprop(theta[positions], positions_BL), tf.float32)
        return tf.cast(x_BLM, self.activation_dtype)

    @layer_method
    def output_logits(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns logits [B,L,V] of the decoder's output."""
        p, x_BLM = self.p, self._scaled(x_BLM)
        if p.tie_softmax:
            logits_BLV = self.shared_embedding.logits(theta[self.EMBEDDING], x_BLM)
        else:
            logits_BLV = self.softmax.fprop(theta.softmax, x_BLM)
        if p.use_logit_bias:
            logits_BLV = add_bias(logits_BLV, theta.logit_bias)
        return soft_cap(logits_BLV, p.logit_cap)

    @layer_method
    def _cross_entropy(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        labels_BL: tf.Tensor,
        segments_BL: tf.Tensor,
        z_loss_weight: float = 0.0,
    ) -> CrossEntropy:
        """Returns sums of losses. If V is large, only a chunk of the logits exists at a time."""
        p = self.p
        vocabulary_size = self.shared_embedding.p.vocabulary_size
        loss = loss_without_logits(p.logits_positions, x_BLM, vocabulary_size)
        if loss is None:
            logits_BLV = self.output_logits(theta, x_BLM)
            with tf.name_scope(f"{LOSS_SCOPE}/"):
                return cross_entropy(
                    logits_BLV, labels_BL, segments_BL, p.label_smoothing, z_loss_weight
                )
        bias_V = theta.logit_bias if p.use_logit_bias else None
        objective = Objective(
            labels_BL, segments_BL, p.label_smoothing, z_loss_weight, p.logit_cap, bias_V
        )
        softmax = self.shared_embedding if p.tie_softmax else self.softmax
        weights = theta[self.EMBEDDING] if p.tie_softmax else theta.softmax
        return softmax.cross_entropy(weights, self._scaled(x_BLM), objective, loss)

    def _scaled(self, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the decoder's output, scaled for the softmax."""
        scale = self.p.logit_scale
        return x_BLM if scale == 1.0 else x_BLM * tf.constant(scale, x_BLM.dtype)

    @property
    def shared_embedding(self) -> TokenEmbedding:
        """The child whose table the softmax may share."""
        return getattr(self, self.EMBEDDING)
