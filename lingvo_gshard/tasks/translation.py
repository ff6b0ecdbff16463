"""Translation with an encoder-decoder Transformer."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.layers.embedding import SinusoidalPositions, Softmax, TokenEmbedding
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory, inherit
from lingvo_gshard.tasks.evaluation import translation_scores
from lingvo_gshard.tasks.evaluation.evaluation import EvaluationRuntime, ShowProgress, no_progress
from lingvo_gshard.tasks.evaluation.translation_scores import TranslationScores
from lingvo_gshard.tasks.flops import stack_flops
from lingvo_gshard.tasks.task import BatchSpecs, Task
from lingvo_gshard.tasks.token_loss import token_loss


class TranslationTask(Task):
    """Source ids to target ids: embeddings, encoder, decoder, softmax and label-smoothed loss.

    The model of arXiv 2006.16668, section 2: a Transformer with a mixture of experts in every other
    layer of the encoder and of the decoder.
    """

    ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
    VOCABULARIES = MappingProxyType(
        {"source_vocabulary_size": "source", "target_vocabulary_size": "target"}
    )
    EVALUATION_OPTIONS = (
        "languages",
        "max_rows_per_language",
        "shuffled",
        "beam_size",
        "length_exponent",
    )
    HAS_OUTPUT_ROWS = True
    DECODER = Translator

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("source_vocabulary_size", 0, "V of the source; 0: taken from the input.")
        p.define("target_vocabulary_size", 0, "V of the target; 0: taken from the input.")
        p.define("model_dim", 0, "Size of M.")
        p.define("encoder", TransformerStack.params(), "Params of the encoder.")
        decoder = TransformerStack.params().set(is_decoder=True)
        p.define("decoder", decoder, "Params of the decoder.")
        p.define("positions", SinusoidalPositions.params(), "Params of the positions.")
        p.define("share_embeddings", False, "Whether source and target ids share one table.")
        p.define("tie_softmax", True, "Whether the softmax's weight is the target embedding.")
        p.define("label_smoothing", 0.1, "Share of the target distribution spread evenly.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.share_embeddings and p.source_vocabulary_size != p.target_vocabulary_size:
            raise ValueError(
                f"task.share_embeddings needs one vocabulary for both sides, but the source has "
                f"{p.source_vocabulary_size} entries and the target {p.target_vocabulary_size}"
            )
        self._create_embedding("target_embedding", p.target_vocabulary_size)
        if not p.share_embeddings:
            self._create_embedding("source_embedding", p.source_vocabulary_size)
        self.create_child("positions", inherit(p.positions, model_dim=p.model_dim))
        for name in ("encoder", "decoder"):
            stack = inherit(p.get(name), model_dim=p.model_dim).set(has_token_ids=True)
            self.create_child(name, stack)
        if not p.tie_softmax:
            softmax = Softmax.params()
            softmax.set(vocabulary_size=p.target_vocabulary_size, model_dim=p.model_dim)
            self.create_child("softmax", softmax)

    def _create_embedding(self, name: str, vocabulary_size: int) -> None:
        p = self.p
        embedding = TokenEmbedding.params()
        embedding.set(vocabulary_size=vocabulary_size, model_dim=p.model_dim)
        self.create_child(name, embedding)

    @layer_method
    def loss(self, theta: NestedMap, batch: NestedMap) -> tuple[tf.Tensor, NestedMap]:
        """Returns the scalar training loss and metrics, name -> (value, weight), of a packed batch.

        The loss is the label-smoothed cross-entropy per target token plus the layers' own losses.
        """
        logits_BLV = self.logits(theta, batch)
        return token_loss(
            logits_BLV,
            batch["target_labels"],
            batch["target_segments"],
            label_smoothing=self.p.label_smoothing,
            counted=[batch["source_segments"]],
        )

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the target positions, with the source positions as the memory."""
        rows, source_length = batch["source_ids"].shape
        return TokenShape(rows, batch["target_labels"].shape[1], memory_length=source_length)

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of encoder, decoder and softmax in one forward pass."""
        softmax = 2 * shape.tokens * self.p.model_dim * self.p.target_vocabulary_size
        encoder = stack_flops(self.encoder, TokenShape(shape.rows, shape.memory_length))
        return encoder + stack_flops(self.decoder, shape) + softmax

    def id_ranges(self) -> dict[str, int]:
        """Returns the vocabulary size of each array of ids."""
        target = self.p.target_vocabulary_size
        return {
            "source_ids": self.p.source_vocabulary_size,
            "target_inputs": target,
            "target_labels": target,
        }

    @layer_method
    def logits(self, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Returns logits [B,L,V] for every target position given those before it."""
        memory = self.encode(
            theta, batch["source_ids"], batch["source_segments"], batch["source_positions"]
        )
        ids_BL, positions_BL = batch["target_inputs"], batch["target_positions"]
        x_BLM = self._embed("target_embedding", theta, ids_BL, positions_BL)
        with context.tokens(ids_BL):
            x_BLM = self.decoder.fprop(theta.decoder, x_BLM, batch["target_segments"], memory)
        return self._softmax(theta, x_BLM)

    @property
    def max_positions(self) -> int:
        """The largest number of positions in a sentence."""
        return self.p.positions.max_length

    @layer_method
    def encode(
        self, theta: NestedMap, ids_BK: tf.Tensor, segments_BK: tf.Tensor, positions_BK: tf.Tensor
    ) -> Memory:
        """Returns what the decoder attends to."""
        name = "target_embedding" if self.p.share_embeddings else "source_embedding"
        x_BKM = self._embed(name, theta, ids_BK, positions_BK)
        with context.tokens(ids_BK):
            output_BKM = self.encoder.fprop(theta.encoder, x_BKM, segments_BK)
        return Memory(output_BKM, segments_BK)

    @layer_method
    def init_cache(self, theta: NestedMap, memory: Memory, length: int) -> NestedMap:
        """Returns the cache for decoding up to `length` tokens of each memory's one sentence."""
        output_BKM = memory.output_BKM
        shape = output_BKM.shape[0], length
        return self.decoder.init_cache(theta.decoder, shape, output_BKM.dtype, memory)

    def reorder_cache(self, cache: NestedMap, rows_B: tf.Tensor) -> NestedMap:
        """Returns the cache with row i taken from row rows[i], which decodes the same sentence."""
        return self.decoder.reorder_cache(cache, rows_B)

    @layer_method
    def decode_step(
        self,
        theta: NestedMap,
        ids_B: tf.Tensor,
        active_B: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns (logits float32 [B,V] of position step + 1, cache) given the ids at `step`.

        Rows whose `active` is 0 have ended: they take no place in any expert.
        """
        positions_B1 = tf.fill([ids_B.shape[0], 1], step)
        x_B1M = self._embed("target_embedding", theta, ids_B[:, None], positions_B1)
        with context.tokens(ids_B[:, None]):
            x_B1M, cache = self.decoder.extend_step(
                theta.decoder, x_B1M, active_B[:, None], step, cache
            )
        logits_B1V = self._softmax(theta, x_B1M)
        return tf.cast(logits_B1V[:, 0], tf.float32), cache

    def make_decoder(
        self, runtime: WeightsHolder, input_: TranslationInput, **options: Any
    ) -> Translator:
        """Returns a Translator of the trained model; see there for the options."""
        vocabularies = input_.source_vocabulary, input_.target_vocabulary
        return Translator(self, runtime, *vocabularies, **options)

    def evaluate(
        self,
        runtime: EvaluationRuntime,
        input_: TranslationInput,
        split: str,
        show_progress: ShowProgress = no_progress,
        *,
        languages: Sequence[str] = (),
        max_rows_per_language: int | None = None,
        shuffled: bool = True,
        beam_size: int = 4,
        length_exponent: float = 1.0,
    ) -> TranslationScores:
        """Translates a split and scores the translations; see the base class.

        Args:
          runtime: holds the weights.
          input_: the input.
          split: name of the split.
          show_progress: opens progress bars.
          languages: source languages to score; empty: all.
          max_rows_per_language: scores a fixed random choice of so many rows; None: all.
          shuffled: whether to score shuffled sources, too.
          beam_size: hypotheses kept for each sentence; 1 decodes greedily.
          length_exponent: how strongly beam search favors long translations; 0 disables it.
        """
        rows = translation_scores.choose_rows(
            input_.rows(split), split, languages, max_rows_per_language
        )
        translator = self.make_decoder(
            runtime, input_, beam_size=beam_size, length_exponent=length_exponent
        )
        return translation_scores.measure(
            runtime, input_, translator, rows, shuffled, show_progress
        )

    def _embed(
        self, name: str, theta: NestedMap, ids_BL: tf.Tensor, positions_BL: tf.Tensor
    ) -> tf.Tensor:
        """The sum of tokens and positions in float32, then in the activations' type."""
        x_BLM = tf.cast(self.children[name].fprop(theta[name], ids_BL), tf.float32)
        x_BLM += tf.cast(self.positions.fprop(theta.positions, positions_BL), tf.float32)
        return tf.cast(x_BLM, self.p.fprop_dtype or "float32")

    @layer_method
    def _softmax(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        if self.p.tie_softmax:
            return self.target_embedding.logits(theta.target_embedding, x_BLM)
        return self.softmax.fprop(theta.softmax, x_BLM)
