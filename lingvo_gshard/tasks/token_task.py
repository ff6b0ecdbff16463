"""TokenTask: what tasks whose decoder predicts the next token have in common."""

from __future__ import annotations

import math
from typing import ClassVar

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.embedding import SinusoidalPositions, Softmax, TokenEmbedding
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import inherit
from lingvo_gshard.tasks.task import Task


class TokenTask(Task):
    """Embeds tokens and their positions, runs a causal decoder, and predicts the next token.

    A subclass defines `loss` and calls the `create_` methods in the order in which it lists its
    children.

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
        p.define("tie_softmax", True, "Whether the softmax's weight is the embedding table.")
        p.define(
            "label_smoothing",
            0.0,
            "Probability spread evenly over the vocabulary.",
            minimum=0,
            below=1,
        )
        return p

    def create_embedding(self, name: str, vocabulary_size: int) -> None:
        """Creates a table of token embeddings."""
        embedding = TokenEmbedding.params()
        embedding.set(vocabulary_size=vocabulary_size, model_dim=self.p.model_dim)
        self.create_child(name, embedding)

    def create_positions(self) -> None:
        """Creates the position embeddings."""
        self.create_child("positions", inherit(self.p.positions, model_dim=self.p.model_dim))

    def create_stack(self, name: str) -> None:
        """Creates the stack whose Params have this name."""
        stack = inherit(self.p.get(name), model_dim=self.p.model_dim).set(has_token_ids=True)
        self.create_child(name, stack)

    def create_softmax(self, vocabulary_size: int) -> None:
        """Creates the softmax, unless it shares the weight of the embedding."""
        if not self.p.tie_softmax:
            softmax = Softmax.params()
            softmax.set(vocabulary_size=vocabulary_size, model_dim=self.p.model_dim)
            self.create_child("softmax", softmax)

    def guessing_loss(self) -> float:
        """Returns log V, the cross-entropy of a token that is guessed evenly."""
        return math.log(self._shared_embedding().p.vocabulary_size)

    @property
    def activation_dtype(self) -> tf.DType:
        """The type of the activations."""
        return tf.as_dtype(self.p.fprop_dtype or "float32")

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the decoder and the softmax in one forward pass."""
        vocabulary_size = self._shared_embedding().p.vocabulary_size
        softmax = 2 * shape.tokens * self.p.model_dim * vocabulary_size
        return self.decoder.flops(shape) + softmax

    @layer_method
    def decode_step(
        self,
        theta: NestedMap,
        ids_B: tf.Tensor,
        active_B: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Computes one position of every row; see `decoding.models.StepwiseModel`."""
        positions_B1 = tf.fill([ids_B.shape[0], 1], step)
        x_B1M = self._embed(self.EMBEDDING, theta, ids_B[:, None], positions_B1)
        with context.tokens(ids_B[:, None]):
            x_B1M, cache = self.decoder.extend_step(
                theta.decoder, x_B1M, active_B[:, None], step, cache
            )
        return tf.cast(self._logits(theta, x_B1M)[:, 0], tf.float32), cache

    @layer_method
    def _embed(
        self, name: str, theta: NestedMap, ids_BL: tf.Tensor, positions_BL: tf.Tensor
    ) -> tf.Tensor:
        """Returns the float32 sum of token and position embeddings, cast to the activations."""
        x_BLM = tf.cast(getattr(self, name).fprop(theta[name], ids_BL), tf.float32)
        if "positions" in self.children:
            x_BLM += tf.cast(self.positions.fprop(theta.positions, positions_BL), tf.float32)
        return tf.cast(x_BLM, self.activation_dtype)

    @layer_method
    def _logits(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns logits [B,L,V] of the decoder's output."""
        if self.p.tie_softmax:
            return self._shared_embedding().logits(theta[self.EMBEDDING], x_BLM)
        return self.softmax.fprop(theta.softmax, x_BLM)

    def _shared_embedding(self) -> TokenEmbedding:
        """Returns the child whose table the softmax may share."""
        return getattr(self, self.EMBEDDING)
