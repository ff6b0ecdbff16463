"""Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290).

A pair has a chosen and a rejected answer to one prompt. With log-probabilities of whole answers,

    margin = beta ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected)))
    loss = -log sigmoid(margin)

where p is the model and q the reference, which stays as it was when training began (equation 7).
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import LOSS_SCOPE
from lingvo_gshard.sharding import einsum

LOCAL_LETTERS = {"j": "pairs of a row"}


class Preferences(Configurable):
    """The loss on pairs of answers."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "beta",
            0.0,
            "How strongly the model is held at the reference; 0: the task learns no preferences.",
            minimum=0,
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


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sums over the answers of each pair in the rows of a batch.

    Attributes:
      chosen_Bj: float32 log-probability of the chosen answer.
      rejected_Bj: float32 log-probability of the rejected answer.
    """

    chosen_Bj: tf.Tensor
    rejected_Bj: tf.Tensor


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
      model: log-probabilities of the model that learns.
      reference: log-probabilities of the reference.
      pairs_Bj: int32, 1 where a row has a pair.
      params: Params of `Preferences`.
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
