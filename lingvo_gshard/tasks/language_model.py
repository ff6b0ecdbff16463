"""A language model: a causal Transformer, dense or with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.decoding.model_facts import ModelFacts
from lingvo_gshard.tasks.evaluation import text_scores
from lingvo_gshard.tasks.evaluation.evaluation import EvaluationRuntime, ShowProgress, no_progress
from lingvo_gshard.tasks.evaluation.text_scores import TextScores
from lingvo_gshard.tasks.task import BatchSpecs
from lingvo_gshard.tasks.token_loss import token_loss
from lingvo_gshard.tasks.token_task import TokenTask


class LanguageModelTask(TokenTask):
    """Predicts each token of a document from the tokens before it.

    The model is the decoder-only Transformer of Radford et al. 2018 ("Improving Language
    Understanding by Generative Pre-Training", section 3.1). With experts in every n-th layer it is
    that of GLaM, arXiv 2112.06905, section 4. Rows hold several packed documents; a document never
    attends to another.

    A batch is int32 [B,L] arrays: `target_inputs` (ids before each position), `target_labels`,
    `target_segments` (number of the document, 0 in padding) and `target_positions`.
    """

    VOCABULARIES = MappingProxyType({"vocabulary_size": "text"})
    DECODER = "Writer"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.decoder.is_causal = True
        p.define("vocabulary_size", 0, "Size of V; 0: taken from the input.", minimum=0)
        p.define(
            "add_positions",
            True,
            "Whether position embeddings are added; False for rotary positions in the attention.",
        )
        p.define(
            "z_loss_weight",
            0.0,
            "Weight of log^2 Z in the loss, which keeps logits near 0.",
            minimum=0,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        decoder = p.decoder
        if decoder.is_decoder or not decoder.is_causal:
            raise ValueError(
                "task.decoder of a language model needs is_causal = True and is_decoder = False, "
                f"not {decoder.is_causal} and {decoder.is_decoder}"
            )
        self.create_embedding("embedding", p.vocabulary_size)
        if p.add_positions:
            self.create_positions()
        self.create_stack("decoder")
        self.create_softmax(p.vocabulary_size)

    @layer_method
    def loss(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, NestedMap]:
        """Returns the mean cross-entropy per token plus the layers' losses; see the base class."""
        return token_loss(
            self.logits(theta, batch),
            batch["target_labels"],
            batch["target_segments"],
            label_smoothing=self.p.label_smoothing,
            z_loss_weight=self.p.z_loss_weight,
        )

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the rows and positions of the packed documents."""
        rows, length = known_sizes(batch["target_labels"].shape)
        return TokenShape(rows, length)

    def id_ranges(self) -> dict[str, int]:
        """Returns the vocabulary size for each array of ids."""
        return dict.fromkeys(("target_inputs", "target_labels"), self.p.vocabulary_size)

    @layer_method
    def logits(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns logits [B,L,V] of each position, given the tokens before it in its document."""
        ids_BL, segments_BL = batch["target_inputs"], batch["target_segments"]
        x_BLM = self._embed("embedding", theta, ids_BL, batch["target_positions"])
        with context.tokens(ids_BL):
            x_BLM = self.decoder.fprop(theta.decoder, x_BLM, segments_BL)
        return self._logits(theta, x_BLM)

    def model_facts(self, length: int, bos_id: int, eos_id: int) -> ModelFacts:
        """Returns what a decoder must know of the model. Texts are as long as rows at most."""
        return ModelFacts(
            vocabulary_size=self.p.vocabulary_size,
            bos_id=bos_id,
            eos_id=eos_id,
            has_source=False,
            most_source=0,
            most_positions=min(length, self.most_positions or length),
        )

    def evaluate(
        self,
        runtime: EvaluationRuntime,
        input_: LanguageModelInput,
        split: str,
        show_progress: ShowProgress = no_progress,
    ) -> TextScores:
        """Scores how well the model predicts the text of a split; see the base class."""
        return text_scores.measure(runtime, input_, split, show_progress)
