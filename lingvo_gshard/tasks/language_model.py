"""A language model: a causal Transformer without a memory, dense or with experts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.decoding.writer import Writer
from lingvo_gshard.layers.embedding import SinusoidalPositions, Softmax, TokenEmbedding
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import inherit
from lingvo_gshard.tasks.evaluation import text_scores
from lingvo_gshard.tasks.evaluation.evaluation import EvaluationRuntime, ShowProgress, no_progress
from lingvo_gshard.tasks.evaluation.text_scores import TextScores
from lingvo_gshard.tasks.flops import stack_flops
from lingvo_gshard.tasks.task import BatchSpecs, Task
from lingvo_gshard.tasks.token_loss import token_loss


class LanguageModelTask(Task):
    """Every token from those before it in its document: embeddings, decoder, softmax and loss.

    The decoder-only Transformer of Radford et al. 2018 ("Improving Language Understanding by
    Generative Pre-Training", section 3.1); with experts in every n-th layer that of GLaM, arXiv
    2112.06905, section 4. Documents are packed, and none sees another.
    """

    ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
    VOCABULARIES = MappingProxyType({"vocabulary_size": "text"})
    DECODER = Writer

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("vocabulary_size", 0, "Size of V; 0: taken from the input.")
        p.define("model_dim", 0, "Size of M.")
        decoder = TransformerStack.params().set(is_causal=True)
        p.define("decoder", decoder, "Params of the layers.")
        p.define("positions", SinusoidalPositions.params(), "Params of the positions.")
        p.define(
            "add_positions",
            True,
            "Whether positions are added to the embeddings; rotary ones are the attention's.",
        )
        p.define("tie_softmax", True, "Whether the softmax's weight is the embedding.")
        p.define("label_smoothing", 0.0, "Share of the target distribution spread evenly.")
        p.define("z_loss_weight", 0.0, "Factor of log^2 Z in the loss, which keeps logits near 0.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        decoder = p.decoder
        if decoder.is_decoder or not decoder.is_causal:
            raise ValueError(
                "task.decoder: a language model is causal and has no memory; is_causal = True and "
                f"is_decoder = False were expected, not {decoder.is_causal}, {decoder.is_decoder}"
            )
        sizes = {"vocabulary_size": p.vocabulary_size, "model_dim": p.model_dim}
        self.create_child("embedding", TokenEmbedding.params().set(**sizes))
        if p.add_positions:
            self.create_child("positions", inherit(p.positions, model_dim=p.model_dim))
        stack = inherit(decoder, model_dim=p.model_dim).set(has_token_ids=True)
        self.create_child("decoder", stack)
        if not p.tie_softmax:
            self.create_child("softmax", Softmax.params().set(**sizes))

    @layer_method
    def loss(self, theta: NestedMap, batch: NestedMap) -> tuple[tf.Tensor, NestedMap]:
        """Returns the scalar training loss and metrics, name -> (value, weight), of a packed batch.

        The loss is the cross-entropy per token plus the layers' own losses.
        """
        return token_loss(
            self.logits(theta, batch),
            batch["target_labels"],
            batch["target_segments"],
            label_smoothing=self.p.label_smoothing,
            z_loss_weight=self.p.z_loss_weight,
        )

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the rows and positions of the packed documents."""
        return TokenShape(*batch["target_labels"].shape)

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of decoder and softmax in one forward pass."""
        softmax = 2 * shape.tokens * self.p.model_dim * self.p.vocabulary_size
        return stack_flops(self.decoder, shape) + softmax

    def id_ranges(self) -> dict[str, int]:
        """Returns the vocabulary size of each array of ids."""
        return dict.fromkeys(("target_inputs", "target_labels"), self.p.vocabulary_size)

    @layer_method
    def logits(self, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Returns logits [B,L,V] for every position given those before it in its segment."""
        ids_BL, segments_BL = batch["target_inputs"], batch["target_segments"]
        x_BLM = self._embed(theta, ids_BL, batch["target_positions"])
        with context.tokens(ids_BL):
            x_BLM = self.decoder.fprop(theta.decoder, x_BLM, segments_BL)
        return self._softmax(theta, x_BLM)

    @layer_method
    def init_cache(self, theta: NestedMap, batch: int, length: int) -> NestedMap:
        """Returns the cache for writing `batch` texts of up to `length` tokens."""
        dtype = tf.as_dtype(self.p.fprop_dtype or "float32")
        return self.decoder.init_cache(theta.decoder, (batch, length), dtype)

    @layer_method
    def decode_step(
        self,
        theta: NestedMap,
        ids_B: tf.Tensor,
        active_B: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns (logits float32 [B,V] of what follows, cache) given the ids at position `step`.

        Rows whose `active` is 0 have ended: they take no place in any expert.
        """
        positions_B1 = tf.fill([ids_B.shape[0], 1], step)
        x_B1M = self._embed(theta, ids_B[:, None], positions_B1)
        with context.tokens(ids_B[:, None]):
            x_B1M, cache = self.decoder.extend_step(
                theta.decoder, x_B1M, active_B[:, None], step, cache
            )
        return tf.cast(self._softmax(theta, x_B1M)[:, 0], tf.float32), cache

    def make_decoder(
        self, runtime: WeightsHolder, input_: LanguageModelInput, **options: Any
    ) -> Writer:
        """Returns a Writer of the trained model; see there for the options."""
        return Writer(self, runtime, input_.vocabulary, input_.p.length, **options)

    def evaluate(
        self,
        runtime: EvaluationRuntime,
        input_: LanguageModelInput,
        split: str,
        show_progress: ShowProgress = no_progress,
    ) -> TextScores:
        """Scores how well the model predicts the text of a split; see the base class."""
        return text_scores.measure(runtime, input_, split, show_progress)

    @layer_method
    def _softmax(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        if self.p.tie_softmax:
            return self.embedding.logits(theta.embedding, x_BLM)
        return self.softmax.fprop(theta.softmax, x_BLM)

    @layer_method
    def _embed(self, theta: NestedMap, ids_BL: tf.Tensor, positions_BL: tf.Tensor) -> tf.Tensor:
        """The sum of tokens and positions in float32, then in the activations' type."""
        x_BLM = tf.cast(self.embedding.fprop(theta.embedding, ids_BL), tf.float32)
        if self.p.add_positions:
            x_BLM += tf.cast(self.positions.fprop(theta.positions, positions_BL), tf.float32)
        return tf.cast(x_BLM, self.p.fprop_dtype or "float32")
