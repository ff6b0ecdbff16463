"""Translation with an encoder-decoder Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lingvo_gshard.core import NestedMap, Params, TokenShape, UserError, known_sizes, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.token_kinds import KINDS
from lingvo_gshard.layers import Memory, TransformerStack, token_context
from lingvo_gshard.tasks.task import BatchSpecs, Decoding
from lingvo_gshard.tasks.token_task import TokenTask, loss_of_sums


class TranslationTask(TokenTask):
    """Translates source sentences: encoder, decoder with cross-attention, and softmax.

    The model of GShard, arXiv 2006.16668, section 2: a Transformer with a mixture of experts in
    every other layer of the encoder and of the decoder.

    A batch is int32 arrays. `source_ids`, `source_segments` and `source_positions` are [B,K];
    `target_inputs` (ids before each position), `target_labels`, `target_segments` and
    `target_positions` are [B,L]. Segments number the sentences of a row, 0 in padding: segment n of
    the target translates segment n of the source.
    """

    VOCABULARIES = MappingProxyType(
        {"source_vocabulary_size": "source", "target_vocabulary_size": "target"}
    )
    EVALUATION_OPTIONS = ("languages", "max_rows_per_language", "shuffled")
    HAS_OUTPUT_ROWS = True
    DECODING = Decoding(has_source=True, beam_size=4, is_evaluated=True)
    EMBEDDING = "target_embedding"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(label_smoothing=0.1)
        p.decoder.is_decoder = True
        p.define("source_vocabulary_size", 0, "V of the source; 0: that of the input.", minimum=0)
        p.define("target_vocabulary_size", 0, "V of the target; 0: that of the input.", minimum=0)
        p.define("encoder", TransformerStack.params(), "Params of the encoder.")
        p.define("add_positions", True, "Whether position embeddings are added; False for T5.")
        p.define(
            "most_source",
            256,
            "Tokens of a source beyond which decoding cuts it; without position embeddings also "
            "the most tokens of a translation.",
            minimum=2,
        )
        p.define("share_embeddings", False, "Whether source and target share one table.")
        p.define("share_positions", True, "Whether source and target share position embeddings.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.share_embeddings and p.source_vocabulary_size != p.target_vocabulary_size:
            raise UserError(
                "share_embeddings needs one vocabulary for both sides, but source_vocabulary_size "
                f"is {p.source_vocabulary_size} and target_vocabulary_size "
                f"{p.target_vocabulary_size}"
            )
        self.create_embedding("target_embedding", p.target_vocabulary_size)
        if not p.share_embeddings:
            self.create_embedding("source_embedding", p.source_vocabulary_size)
        if p.add_positions:
            self.create_positions()
            if not p.share_positions:
                self.create_positions("source_positions")
        self.create_stack("encoder")
        self.create_stack("decoder")
        self.create_softmax(p.target_vocabulary_size)

    @layer_method
    def loss(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, NestedMap]:
        """Returns the mean label-smoothed cross-entropy per target token plus the layers' losses.

        See the base class.
        """
        segments_BL = batch["target_segments"]
        state_BLM = self._states(theta, batch)
        sums = self._cross_entropy(theta, state_BLM, batch["target_labels"], segments_BL)
        return loss_of_sums(sums, segments_BL, batch["source_segments"])

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the target positions, with the source positions as the memory."""
        rows, source_length = known_sizes(batch["source_ids"].shape)
        _, length = known_sizes(batch["target_labels"].shape)
        return TokenShape(rows, length, memory_length=source_length)

    def id_ranges(self) -> dict[str, int]:
        """Returns the vocabulary size for each array of ids."""
        target = self.p.target_vocabulary_size
        return {
            "source_ids": self.p.source_vocabulary_size,
            "target_inputs": target,
            "target_labels": target,
        }

    @layer_method
    def logits(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns logits [B,L,V] of each target position, given the source and prior tokens."""
        return self.output_logits(theta, self._states(theta, batch))

    @layer_method
    def _states(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the decoder's output [B,L,M]."""
        kinds_BK = batch.get(f"source{KINDS}")
        memory = self.encode(
            theta,
            batch["source_ids"],
            batch["source_segments"],
            batch["source_positions"],
            kinds_BK,
        )
        ids_BL, positions_BL = batch["target_inputs"], batch["target_positions"]
        x_BLM = self.embed("target_embedding", theta, ids_BL, positions_BL)
        with token_context.tokens(ids_BL, batch.get(f"target{KINDS}")):
            return self.decoder.fprop(theta.decoder, x_BLM, batch["target_segments"], memory)

    @layer_method
    def encode(
        self,
        theta: NestedMap,
        ids_BK: tf.Tensor,
        segments_BK: tf.Tensor,
        positions_BK: tf.Tensor,
        kinds_BK: tf.Tensor | None = None,
    ) -> Memory:
        """Returns the encoder's output, which the decoder attends to.

        Args:
          ids_BK: the tokens of the sources.
          segments_BK: the sentence of each token; 0 in padding.
          positions_BK: the position of each token in its sentence.
          kinds_BK: what watched routers count the tokens by; see `token_context.tokens`.
        """
        x_BKM = self.embed_source(theta, ids_BK, positions_BK)
        with token_context.tokens(ids_BK, kinds_BK):
            output_BKM = self.encoder.fprop(theta.encoder, x_BKM, segments_BK)
        return Memory(output_BKM, segments_BK)

    @layer_method
    def embed_source(
        self, theta: NestedMap, ids_BK: tf.Tensor, positions_BK: tf.Tensor
    ) -> tf.Tensor:
        """Returns the encoder's input [B,K,M]."""
        name = "target_embedding" if self.p.share_embeddings else "source_embedding"
        positions = "positions" if self.p.share_positions else "source_positions"
        return self.embed(name, theta, ids_BK, positions_BK, positions)
