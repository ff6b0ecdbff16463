"""Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290).

A pair has a chosen and a rejected answer to one prompt. With log-probabilities of whole answers,

    margin = beta ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected)))
    loss = -log sigmoid(margin)

where p is the model and q the reference, which stays as it was when training began (equation 7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lingvo_gshard.core import LOSS_SCOPE, NestedMap, Params, context, known_sizes, tf
from lingvo_gshard.layers import losses
from lingvo_gshard.sharding import einsum
from lingvo_gshard.tasks import (
    LANGUAGE_MODEL_FEATURES,
    LanguageModelTask,
    Task,
    TaskFeature,
    count_tokens,
)
from lingvo_gshard.wings.fine_tuning.adapters import switched_off

LOCAL_LETTERS = {"j": "pairs of a row"}


# Name of the child that holds the reference.
REFERENCE = "reference"


@LANGUAGE_MODEL_FEATURES.register("preferences")
class Preferences(TaskFeature):
    """The loss on pairs of answers, in place of a language model's own.

    The reference is a second model, unless the model has adapters: then it is the model without.
    """

    HELP = "Params of the loss on pairs of a chosen and a rejected answer."
    REPLACES_LOSS = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "beta", 0.0, "How strongly the reference holds the model; 0: no preferences.", minimum=0
        )
        p.define(
            "label_smoothing",
            0.0,
            "Probability that a pair is labeled the wrong way round (arXiv 2305.18290, "
            "conservative DPO).",
            minimum=0,
            below=0.5,
        )
        return p

    @property
    def is_active(self) -> bool:
        """Whether the task learns preferences."""
        return self.p.beta > 0

    def create(self, task: Task) -> None:
        """Adds the reference to a task without adapters."""
        if not task.p.lora.rank:
            other = task.p.copy()
            self.switch_off(other.preferences)
            task.create_child(REFERENCE, other)

    def declared(self, task: Task, specs: NestedMap) -> NestedMap:
        """Returns the declarations, with a reference that training never changes."""
        del task
        if REFERENCE not in specs:
            return specs
        kept = specs[REFERENCE].transform(
            lambda spec: dataclasses.replace(spec, is_frozen=True, update_rule=_keep)
        )
        return NestedMap(specs, **{REFERENCE: kept})

    def switch_off(self, params: Params) -> None:
        """Sets Params of these to learn no preferences."""
        params.beta = 0.0

    def merged(self, task: Task, theta: NestedMap) -> NestedMap:
        """Returns the weights without the reference."""
        del task
        return without_reference(theta)

    def loss(
        self, task: Task, theta: NestedMap, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the loss on pairs of answers plus the layers' losses, and metrics."""
        assert isinstance(task, LanguageModelTask)
        segments_BL, marks_BL = batch["target_segments"], batch["target_marks"]
        own_BL, answers = _answers(task, theta, batch)
        # The reference draws no random numbers and reports nothing.
        with context.scope(training=False):
            if REFERENCE in theta:
                _, before = _answers(task.reference, theta[REFERENCE], batch)
            else:
                _, before = _answers(task, switched_off(theta), batch)
        loss, metrics = preference_loss(answers, before, batch["pairs"], self.p)
        counted_BL = tf.where(tf.equal(marks_BL, 1), -tf.stop_gradient(own_BL), 0.0)
        tokens = tf.reduce_sum(tf.cast(tf.equal(marks_BL, 1), tf.float32))
        metrics.update(
            context.current().metrics,
            loss=(loss, metrics.accuracy[1]),
            cross_entropy=(tf.reduce_sum(counted_BL) / tf.maximum(tokens, 1.0), tokens),
            tokens=(count_tokens(segments_BL), tf.ones([])),
        )
        return loss + task.layer_losses(), metrics


def without_reference(tree: NestedMap) -> NestedMap:
    """Returns a tree of weights, or of their specs, without the reference."""
    return NestedMap({name: child for name, child in tree.items() if name != REFERENCE})


def _keep(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the weight: the rule of weights that never change."""
    del value
    return weight


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sums over the answers of each pair in the rows of a batch.

    Attributes:
      chosen_Bj: float32 log-probability of the chosen answer.
      rejected_Bj: float32 log-probability of the rejected answer.
    """

    chosen_Bj: tf.Tensor
    rejected_Bj: tf.Tensor


def _answers(
    task: LanguageModelTask, theta: NestedMap, batch: Mapping[str, tf.Tensor]
) -> tuple[tf.Tensor, Answers]:
    """Returns the log-probabilities of labels, [B,L], and of whole answers."""
    logits_BLV = task.logits(theta, batch)
    own_BL = -losses.per_token(logits_BLV, batch["target_labels"], 0.0, 0.0)[0]
    (_, pairs) = known_sizes(batch["pairs"].shape)
    return own_BL, answers_of(own_BL, batch["target_segments"], batch["target_marks"], pairs)


def answers_of(
    log_probability_BL: tf.Tensor, segments_BL: tf.Tensor, marks_BL: tf.Tensor, pairs: int
) -> Answers:
    """Returns the log-probabilities of whole answers.

    Args:
      log_probability_BL: float32 log-probability of each token.
      segments_BL: int32 segments. Pair n of a row, counted from 1, is chosen in segment 2n - 1 and
        rejected in segment 2n.
      marks_BL: int32, 1 for the tokens of answers.
      pairs: the largest number of pairs of a row.
    """
    # The value of a token that does not count may be infinite.
    counted_BL = tf.where(tf.equal(marks_BL, 1), log_probability_BL, 0.0)
    first_j = 2 * tf.range(pairs) + 1

    def summed(segment_j: tf.Tensor) -> tf.Tensor:
        is_inside_BLj = tf.cast(tf.equal(tf.expand_dims(segments_BL, -1), segment_j), tf.float32)
        return einsum("BL,BLj->Bj", counted_BL, is_inside_BLj)

    return Answers(summed(first_j), summed(first_j + 1))


def preference_loss(
    model: Answers, reference: Answers, pairs_Bj: tf.Tensor, params: Params
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the mean loss of the pairs, and metrics: name -> (value, weight).

    Args:
      pairs_Bj: int32, 1 where a row has a pair.
    """
    beta, smoothing = params.beta, params.label_smoothing
    with tf.name_scope(f"{LOSS_SCOPE}/"):
        is_pair_Bj = tf.cast(pairs_Bj, tf.float32)
        count = tf.reduce_sum(is_pair_Bj)

        def mean(x_Bj: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(x_Bj * is_pair_Bj) / tf.maximum(count, 1.0)

        chosen_Bj = beta * (model.chosen_Bj - tf.stop_gradient(reference.chosen_Bj))
        rejected_Bj = beta * (model.rejected_Bj - tf.stop_gradient(reference.rejected_Bj))
        margin_Bj = chosen_Bj - rejected_Bj
        loss = mean(
            (1 - smoothing) * tf.nn.softplus(-margin_Bj) + smoothing * tf.nn.softplus(margin_Bj)
        )
        metrics = NestedMap(
            accuracy=(mean(tf.cast(margin_Bj > 0, tf.float32)), count),
            margin=(mean(margin_Bj), count),
            chosen_reward=(mean(chosen_Bj), count),
            rejected_reward=(mean(rejected_Bj), count),
        )
        return loss, metrics
