"""A language model: a causal Transformer, dense or with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lingvo_gshard.core import Seam, context, tf
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.core.token_kinds import KINDS
from lingvo_gshard.layers import token_context
from lingvo_gshard.sharding import annotate
from lingvo_gshard.tasks.task import BatchSpecs, Decoding, TaskFeature
from lingvo_gshard.tasks.token_task import FutureToken, TokenTask, loss_of_sums

# Arrays of a batch that a prediction further ahead reads.
_SHIFTED = ("target_inputs", "target_labels", "target_segments", "target_positions", "target_marks")

# Features of language models alone, by the names of their Params.
LANGUAGE_MODEL_FEATURES: Seam[type[TaskFeature]] = Seam("language_model_features")


class LanguageModelTask(TokenTask):
    """Predicts each token of a document from the tokens before it.

    The model is the decoder-only Transformer of Radford et al. 2018 ("Improving Language
    Understanding by Generative Pre-Training", section 3.1). With experts in every n-th layer the
    model is GLaM (arXiv 2112.06905, section 4). Rows hold several packed documents; a document
    never attends to another.

    With `future_tokens`, training predicts further tokens as well (DeepSeek-V3, arXiv 2412.19437,
    section 2.2). Evaluation and decoding do not.

    A batch is int32 [B,L] arrays: `target_inputs` (ids before each position), `target_labels`,
    `target_segments` (number of the document, 0 in padding) and `target_positions`. With
    `target_marks`, the loss counts the positions whose mark is 1 only.
    """

    VOCABULARIES = MappingProxyType({"vocabulary_size": "text"})
    DECODING = Decoding(has_source=False)
    EVALUATION_OPTIONS = ("by_source",)
    FEATURES = (*TokenTask.FEATURES, LANGUAGE_MODEL_FEATURES)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.decoder.is_causal = True
        p.define("vocabulary_size", 0, "Size of V; 0: taken from the input.", minimum=0)
        p.define(
            "add_positions", True, "Whether position embeddings are added; not with rotations."
        )
        p.define(
            "z_loss_weight", 0.0, "Weight of log^2 Z in the loss. It keeps logits small.", minimum=0
        )
        p.define(
            "future_tokens", 0, "Tokens after the next one that training predicts, too.", minimum=0
        )
        p.define("future_weight", 0.3, "Factor of the mean loss of these predictions.", minimum=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        decoder = p.decoder
        if decoder.is_decoder or not decoder.is_causal:
            raise UserError(
                "task.decoder of a language model needs is_causal = True and is_decoder = False, "
                f"not {decoder.is_causal} and {decoder.is_decoder}"
            )
        self.create_embedding("embedding", p.vocabulary_size)
        if p.add_positions:
            self.create_positions()
        self.create_stack("decoder")
        self.create_softmax(p.vocabulary_size)
        if p.future_tokens:
            self._create_future()
        for feature in self.features.values():
            feature.create(self)

    def guessing_loss(self) -> float | None:
        """Returns log V; None if a feature replaces the loss."""
        return None if self.replaces_loss else super().guessing_loss()

    @property
    def _replacing(self) -> TaskFeature | None:
        """The feature that replaces the loss; None if none does."""
        return next((each for each in self.features.values() if each.REPLACES_LOSS), None)

    def _create_future(self) -> None:
        """Creates the modules that predict tokens further ahead, like the decoder's last layer."""
        p = self.p
        if p.decoder.shared_relative_bias.buckets:
            raise UserError(
                f"task.future_tokens: {p.future_tokens} with task.decoder.shared_relative_bias; "
                "0 was expected, or buckets of each layer"
            )
        future = FutureToken.params().set(
            model_dim=p.model_dim,
            norm=p.decoder.layer.norm,
            layer=self.decoder.layer_params(p.decoder.num_layers - 1),
        )
        self.create_children("future", [future] * p.future_tokens)

    @layer_method
    def loss(
        self, theta: NestedMap, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, Mapping[str, context.Metric]]:
        """Returns the mean cross-entropy per token plus the layers' losses; see the base class.

        A feature may replace the loss.
        """
        if self._replacing:
            return self._replacing.loss(self, theta, batch)
        state_BLM = self._states(theta, batch)
        if self.p.future_tokens and context.current().training:
            self._predict_future(theta, batch, state_BLM)
        labels_BL, segments_BL = batch["target_labels"], batch["target_segments"]
        counted_BL = _counted(segments_BL, batch.get("target_marks"))
        sums = self._cross_entropy(theta, state_BLM, labels_BL, counted_BL, self.p.z_loss_weight)
        return loss_of_sums(sums, segments_BL)

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the rows and positions of the packed documents."""
        rows, length = known_sizes(batch["target_labels"].shape)
        return TokenShape(rows, length)

    def id_ranges(self) -> dict[str, int]:
        """Returns the vocabulary size for each array of ids."""
        ids = ("target_inputs", "target_labels")
        return {**dict.fromkeys(ids, self.p.vocabulary_size), "target_marks": 2, "pairs": 2}

    @layer_method
    def logits(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns logits [B,L,V] of each position, given the tokens before it in its document."""
        return self.output_logits(theta, self._states(theta, batch))

    @layer_method
    def _states(self, theta: NestedMap, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the decoder's output [B,L,M]."""
        ids_BL, segments_BL = batch["target_inputs"], batch["target_segments"]
        x_BLM = self.embed("embedding", theta, ids_BL, batch["target_positions"])
        with token_context.tokens(ids_BL, batch.get(f"target{KINDS}")):
            return self.decoder.fprop(theta.decoder, x_BLM, segments_BL)

    @layer_method
    def _predict_future(
        self, theta: NestedMap, batch: Mapping[str, tf.Tensor], state_BLM: tf.Tensor
    ) -> None:
        """Adds the losses of the predictions further ahead, each within its document.

        arXiv 2412.19437, equations 24 and 25.
        """
        p, segments_BL = self.p, batch["target_segments"]
        kinds_BL = batch.get(f"target{KINDS}")
        for index, (module, weights) in enumerate(zip(self.future, theta.future, strict=True)):
            names = [name for name in _SHIFTED if name in batch]
            ahead = {name: _shifted(batch[name], index + 1) for name in names}
            is_inside_BL = tf.equal(ahead["target_segments"], segments_BL)
            inside_BL = tf.where(is_inside_BL, segments_BL, 0)
            counted_BL = _counted(inside_BL, ahead.get("target_marks"))
            ids_BL, positions_BL = ahead["target_inputs"], ahead["target_positions"]
            token_BLM = self.embed("embedding", theta, ids_BL, positions_BL)
            ahead_kinds_BL = None if kinds_BL is None else _shifted(kinds_BL, index + 1)
            with token_context.tokens(ids_BL, ahead_kinds_BL):
                state_BLM, output_BLM = module.fprop(weights, state_BLM, token_BLM, inside_BL)
            sums = self._cross_entropy(
                theta, output_BLM, ahead["target_labels"], counted_BL, p.z_loss_weight
            )
            tokens = tf.maximum(sums.tokens, 1.0)
            loss = sums.smoothed / tokens * (p.future_weight / p.future_tokens)
            module.add_loss("loss", loss, sums.tokens)
            module.add_metric("cross_entropy", sums.exact / tokens, sums.tokens)


def _counted(segments_BL: tf.Tensor, marks_BL: tf.Tensor | None) -> tf.Tensor:
    """Returns the segments of the positions that the loss counts; 0 elsewhere.

    Args:
      segments_BL: int32 segments, 0 in padding.
      marks_BL: int32, 1 where the loss counts a position; None counts all but padding.
    """
    return segments_BL if marks_BL is None else tf.where(tf.equal(marks_BL, 1), segments_BL, 0)


def _shifted(x_BL: tf.Tensor, count: int) -> tf.Tensor:
    """Returns what each row has `count` positions later; 0 after its end."""
    _, length = known_sizes(x_BL.shape)
    count = min(count, length)
    return annotate(tf.pad(x_BL[:, count:], [[0, 0], [0, count]]), "BL")
