"""Compares label-smoothed cross-entropy with the formula; padding has no effect."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.losses import cross_entropy
from lingvo_gshard.testing.layers import assert_close

B, L, V = 2, 4, 9
LOGITS = (3 * np.random.default_rng(1).normal(size=(B, L, V))).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, V, (B, L)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 2, 0], [1, 0, 0, 0]], np.int32)

each_smoothing = parameterized.parameters(0.0, 0.1, 1.0)


def reference(logits, labels, segments, smoothing) -> tuple[float, float, int, int]:
    """Returns the sums of CrossEntropy, computed token by token in float64."""
    smoothed = exact = correct = tokens = 0
    for row, column in zip(*np.nonzero(segments), strict=True):
        values, label = logits[row, column].astype(np.float64), labels[row, column]
        log_probabilities = values - np.log(np.exp(values).sum())
        target = np.full(V, smoothing / V)
        target[label] += 1 - smoothing
        smoothed -= (target * log_probabilities).sum()
        exact -= log_probabilities[label]
        correct += int(values.argmax() == label)
        tokens += 1
    return smoothed, exact, correct, tokens


def loss_and_gradient(function, logits):
    logits = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = function(logits)
    return loss, tape.gradient(loss, logits)


class CrossEntropyTest(testing.TestCase, parameterized.TestCase):
    @each_smoothing
    def test_sums_match_the_formula(self, smoothing):
        sums = cross_entropy(
            tf.constant(LOGITS), tf.constant(LABELS), tf.constant(SEGMENTS), smoothing
        )
        smoothed, exact, correct, tokens = reference(LOGITS, LABELS, SEGMENTS, smoothing)
        assert_close(sums.smoothed, smoothed, "float32")
        assert_close(sums.exact, exact, "float32")
        self.assertEqual((float(sums.correct), float(sums.tokens)), (correct, tokens))

    @each_smoothing
    def test_the_gradient_matches_the_formula(self, smoothing):
        def plain(logits):
            target = (1 - smoothing) * tf.one_hot(LABELS, V) + smoothing / V
            losses = -tf.reduce_sum(target * tf.nn.log_softmax(logits), -1)
            return tf.reduce_sum(tf.where(SEGMENTS > 0, losses, 0.0))

        def written_out(logits):
            return cross_entropy(logits, LABELS, SEGMENTS, smoothing).smoothed

        (loss, gradient), (plain_loss, plain_gradient) = (
            loss_and_gradient(f, LOGITS) for f in (written_out, plain)
        )
        assert_close(loss, plain_loss, "order")
        assert_close(gradient, plain_gradient, "order")
        self.assertEqual(np.abs(gradient.numpy()[SEGMENTS == 0]).max(), 0)

    def test_correct_counts_labels_with_the_largest_logit(self):
        labels = LOGITS.argmax(-1).astype(np.int32)
        sums = cross_entropy(tf.constant(LOGITS), tf.constant(labels), tf.constant(SEGMENTS), 0.1)
        self.assertEqual(float(sums.correct), float(sums.tokens))
        self.assertEqual(float(sums.tokens), 4)

    def test_padding_has_no_effect(self):
        def sums(logits, labels):
            result = cross_entropy(
                tf.constant(logits), tf.constant(labels), tf.constant(SEGMENTS), 0.1
            )
            return [
                float(x) for x in (result.smoothed, result.exact, result.correct, result.tokens)
            ]

        logits, labels = LOGITS.copy(), LABELS.copy()
        logits[SEGMENTS == 0] = 1e4
        labels[SEGMENTS == 0] = V - 1
        self.assertEqual(sums(logits, labels), sums(LOGITS, LABELS))

    def test_padding_may_overflow(self):
        logits = LOGITS.copy()
        logits[SEGMENTS == 0] = 1e30

        def smoothed(x: tf.Tensor) -> tf.Tensor:
            return cross_entropy(x, tf.constant(LABELS), tf.constant(SEGMENTS), 0.1, 0.01).smoothed

        (loss, gradient), (plain, expected) = (
            loss_and_gradient(smoothed, x) for x in (logits, LOGITS)
        )
        self.assertAllEqual(loss, plain)
        self.assertAllEqual(gradient, expected)

    def test_only_padding_gives_zero(self):
        sums = cross_entropy(
            tf.constant(LOGITS), tf.constant(LABELS), tf.zeros([B, L], tf.int32), 0.1
        )
        self.assertEqual(
            [float(x) for x in (sums.smoothed, sums.exact, sums.correct, sums.tokens)], [0] * 4
        )

    @parameterized.parameters(1e30, np.inf, -np.inf, np.nan)
    def test_padding_may_have_any_logits(self, value):
        logits = np.ones((1, 3, V), np.float32)
        logits[0, 2, 0] = value
        labels, mask = np.array([[1, 2, 0]]), np.array([[1, 1, 0]])
        for z_loss in (0.0, 0.5):
            sums = cross_entropy(tf.constant(logits), labels, mask, 0.1, z_loss)
            found = [float(x) for x in (sums.smoothed, sums.exact, sums.correct, sums.tokens)]
            whole = cross_entropy(
                tf.constant(logits[:, :2]), labels[:, :2], mask[:, :2], 0.1, z_loss
            )
            self.assertEqual(
                found, [float(x) for x in (whole.smoothed, whole.exact, whole.correct, 2.0)]
            )
            _, gradient = loss_and_gradient(
                lambda x, z=z_loss: cross_entropy(x, labels, mask, 0.1, z).smoothed, logits
            )
            self.assertTrue(np.isfinite(gradient).all())
            self.assertFalse(np.any(gradient[0, 2]))

    def test_large_logits_do_not_overflow(self):
        logits = np.zeros((1, 1, V), np.float32)
        logits[..., 0] = 1e4
        loss, gradient = loss_and_gradient(
            lambda x: cross_entropy(x, np.array([[1]]), np.array([[1]]), 0.0).smoothed, logits
        )
        self.assertEqual(float(loss), 1e4)
        self.assertTrue(np.isfinite(gradient).all())

    def test_bfloat16_logits_are_summed_in_float32(self):
        rounded = tf.cast(LOGITS, tf.bfloat16)

        def smoothed(logits):
            return cross_entropy(logits, LABELS, SEGMENTS, 0.1).smoothed

        loss, gradient = loss_and_gradient(smoothed, rounded)
        exact_loss, exact_gradient = loss_and_gradient(smoothed, tf.cast(rounded, tf.float32))
        self.assertEqual(loss.dtype, tf.float32)
        self.assertEqual(gradient.dtype, tf.bfloat16)
        self.assertEqual(float(loss), float(exact_loss))
        self.assertAllEqual(gradient, tf.cast(exact_gradient, tf.bfloat16))


if __name__ == "__main__":
    testing.main()
