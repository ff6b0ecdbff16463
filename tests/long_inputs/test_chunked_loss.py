"""Compares the loss in chunks with a loop over positions in float64, values and gradients."""

from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.losses import Objective
from lingvo_gshard.wings.long_inputs.chunked_loss import chunked_cross_entropy

B, L, M, V = 3, 5, 8, 13
NUMBERS = np.random.default_rng(1)
X = NUMBERS.normal(size=(B, L, M)).astype(np.float32)
W = NUMBERS.normal(size=(M, V)).astype(np.float32)
BIAS = NUMBERS.normal(size=V).astype(np.float32)
LABELS = NUMBERS.integers(0, V, (B, L)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 2, 2, 0], [0, 0, 0, 0, 0], [1, 2, 3, 3, 3]], np.int32)
# The right label of one position, so that some tokens are correct.
LABELS[0, 1] = (X[0, 1] @ W + BIAS).argmax()

CASES = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss_weight": 0.05},
    "cap": {"cap": 1.5},
    "bias": {"bias_V": BIAS},
    "all": {"label_smoothing": 0.2, "z_loss_weight": 0.01, "cap": 4.0, "bias_V": BIAS},
}


def reference(x, w, label_smoothing=0.0, z_loss_weight=0.0, cap=0.0, bias_V=None):
    """Returns the sums of CrossEntropy and the gradients of x, w and bias, position by position."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    bias = np.zeros(V) if bias_V is None else bias_V.astype(np.float64)
    d_x, d_w, d_bias = np.zeros_like(x), np.zeros_like(w), np.zeros(V)
    smoothed = exact = correct = tokens = 0
    for row, column in zip(*np.nonzero(SEGMENTS), strict=True):
        label = LABELS[row, column]
        raw = x[row, column] @ w + bias
        logits = cap * np.tanh(raw / cap) if cap else raw
        log_z = np.log(np.exp(logits).sum())
        target = np.full(V, label_smoothing / V)
        target[label] += 1 - label_smoothing
        smoothed += log_z - target @ logits + z_loss_weight * log_z**2
        exact += log_z - logits[label]
        correct += int(logits.argmax() == label)
        tokens += 1
        d = np.exp(logits - log_z) * (1 + 2 * z_loss_weight * log_z) - target
        d *= 1 - np.tanh(raw / cap) ** 2 if cap else 1.0
        d_x[row, column] = w @ d
        d_w += np.outer(x[row, column], d)
        d_bias += d
    return (smoothed, exact, correct, tokens), (d_x, d_w, d_bias)


def computed(x, w, layout, positions, training=True, factor=1.0, **objective):
    """Returns the sums, and the gradients of factor x smoothed."""
    bias_V = objective.pop("bias_V", None)
    x, w = tf.constant(x), tf.constant(w)
    bias = None if bias_V is None else tf.constant(bias_V)
    weights = [x, w] if bias is None else [x, w, bias]
    with context.scope(training=training), tf.GradientTape() as tape:
        tape.watch(weights)
        options = Objective(tf.constant(LABELS), tf.constant(SEGMENTS), bias_V=bias, **objective)
        sums = chunked_cross_entropy(x, w, layout, options, positions)
        loss = factor * sums.smoothed
    gradients: Any = tape.gradient(loss, weights)
    return (sums.smoothed, sums.exact, sums.correct, sums.tokens), gradients


class ChunkedLossTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(case=list(CASES), positions=[1, 4, 7, 15, 100])
    def test_sums_and_gradients_match_the_formula(self, case, positions):
        sums, gradients = computed(X, W, "MV", positions, **CASES[case])
        expected, expected_gradients = reference(X, W, **CASES[case])
        self.assertAllClose(np.array(sums), np.array(expected), rtol=2e-6, atol=2e-6)
        for found, wanted in zip(gradients, expected_gradients, strict=False):
            self.assertAllClose(found, wanted, rtol=2e-5, atol=2e-5)

    @parameterized.product(compiled=[False, True], training=[False, True], layout=["MV", "VM"])
    def test_modes(self, compiled, training, layout):
        w = W if layout == "MV" else W.T.copy()

        def run():
            return computed(X, w, layout, 4, training=training, factor=0.25, **CASES["all"])

        function = tf.function(run, jit_compile=True, autograph=False) if compiled else run
        sums, (d_x, d_w, d_bias) = function()
        expected, gradients = reference(X, W, **CASES["all"])
        self.assertAllClose(np.array(sums), np.array(expected), rtol=2e-6, atol=2e-6)
        d_w = d_w if layout == "MV" else tf.transpose(d_w)
        for found, wanted in zip((d_x, d_w, d_bias), gradients, strict=True):
            self.assertAllClose(found, 0.25 * wanted, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    testing.main()
