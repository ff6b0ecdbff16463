"""Tests the language model: attention within documents, its loss, and its FLOPs."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.embedding import LearnedPositions
from lingvo_gshard.layers.moe import MixtureOfExperts, Top2Router
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.step import FORWARD_AND_BACKWARD
from tests.layers.stacks.executions import loop

V, M, B, L = 11, 8, 2, 6

# The first row has two documents and padding, the second one document.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], np.int32)


def batch_of(seed=0):
    numbers = np.random.default_rng(seed)
    inputs, labels = numbers.integers(4, V, (2, B, L), np.int32) * (SEGMENTS > 0)
    return {
        "target_inputs": inputs,
        "target_labels": labels,
        "target_segments": SEGMENTS,
        "target_positions": POSITIONS,
    }


def task_of(**values):
    """Returns a dense model of two layers; values set Params by path, with __ for dots."""
    p = LanguageModelTask.params().set(vocabulary_size=V, model_dim=M)
    p.decoder.set(num_layers=2, num_heads=2, hidden_dim=12, moe_every=0)
    p.decoder.moe = MixtureOfExperts.params().set(num_experts=3, group_size=4)
    p.decoder.moe.router = Top2Router.params().set(evaluation_capacity_factor=3.0)
    for name, value in values.items():
        p.set_path(name.replace("__", "."), value)
    return p.instantiate()


def tensors(batch):
    return NestedMap({name: tf.constant(value) for name, value in batch.items()})


def logits_of(task, batch, theta=None):
    with context.scope(training=False):
        return task.logits(theta or task.init(1), tensors(batch)).numpy()


MODELS = {
    "dense": {},
    "rotary": {
        "add_positions": False,
        "decoder__layer__self_attention__rotary_fraction": 1.0,
        "decoder__layer__norm": RMSNorm.params(),
        "decoder__layer__feed_forward__activation": "swiglu",
    },
    "learned": {"positions": LearnedPositions.params().set(max_length=L), "tie_softmax": False},
    "experts": {"decoder__moe_every": 2},
    "experts after a dense layer": {
        "decoder__moe_every": 1,
        "decoder__dense_first": 1,
        "decoder__num_layers": 3,
    },
}
each_model = parameterized.parameters(*MODELS)


class LogitsTest(testing.TestCase, parameterized.TestCase):
    @each_model
    def test_attention_is_causal_and_stays_within_documents(self, name):
        task = task_of(**MODELS[name])
        theta, batch = task.init(1), batch_of()
        before = logits_of(task, batch, theta)
        self.assertEqual(before.shape, (B, L, V))
        for row, position, seen_by in ((0, 1, {1, 2}), (0, 3, {3, 4}), (1, 2, {2, 3, 4, 5})):
            inputs = batch["target_inputs"].copy()
            inputs[row, position] = 4 + (inputs[row, position] - 3) % (V - 4)
            after = logits_of(task, {**batch, "target_inputs": inputs}, theta)
            changed = (np.abs(after - before).max(-1) > 1e-6) & (SEGMENTS > 0)
            self.assertEqual(set(np.flatnonzero(changed[row])), seen_by)
            self.assertFalse(changed[1 - row].any())

    @each_model
    def test_logits_do_not_depend_on_the_position_in_the_row(self, name):
        """Expects the second document of a row to have the same logits in its own row."""
        task = task_of(**MODELS[name])
        theta, batch = task.init(1), batch_of()
        moved = {key: np.zeros_like(value) for key, value in batch.items()}
        for key, value in batch.items():
            moved[key][0, :2] = value[0, 3:5]
        moved["target_segments"][0, :2] = 1
        here = logits_of(task, batch, theta)[0, 3:5]
        self.assertAllClose(logits_of(task, moved, theta)[0, :2], here, rtol=1e-7, atol=1e-5)

    def test_scales_and_caps_of_embeddings_and_logits(self):
        task = task_of(embedding_scale=0.5, logit_scale=0.25, logit_cap=0.3, add_positions=False)
        plain = task_of(embedding_scale=1.0, add_positions=False)
        theta, batch = plain.init(1), batch_of()
        halved = NestedMap(theta, embedding=NestedMap(table=0.5 * theta.embedding.table))
        expected = 0.3 * np.tanh(2 * 0.25 * logits_of(plain, batch, halved) / 0.3)
        self.assertAllClose(logits_of(task, batch, theta), expected, rtol=1e-7, atol=1e-5)
        self.assertGreater(np.abs(expected).max(), 0.2)

    def test_a_bias_of_the_logits(self):
        task, plain = task_of(use_logit_bias=True, logit_cap=2.0), task_of()
        theta, batch = plain.init(1), batch_of()
        bias = np.linspace(-1, 1, V, dtype=np.float32)
        expected = 2.0 * np.tanh((logits_of(plain, batch, theta) + bias) / 2.0)
        biased = NestedMap(theta, logit_bias=tf.constant(bias))
        self.assertAllClose(logits_of(task, batch, biased), expected, rtol=1e-7, atol=1e-5)
        self.assertAllEqual(task.init(1).logit_bias, np.zeros(V))


class LossTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters((0.0, 0.0), (0.1, 0.0), (0.0, 0.05))
    def test_the_loss_matches_the_formula(self, smoothing, z_weight):
        task = task_of(label_smoothing=smoothing, z_loss_weight=z_weight)
        theta, batch = task.init(1), batch_of()
        with context.scope(training=True, seed=tf.constant([1, 2])):
            loss, metrics = task.loss(theta, tensors(batch))
        logits = logits_of(task, batch, theta)[SEGMENTS > 0].astype(np.float64)
        labels = batch["target_labels"][SEGMENTS > 0]
        log_z = np.log(np.exp(logits).sum(-1))
        log_probabilities = logits - log_z[:, None]
        exact = -log_probabilities[np.arange(len(labels)), labels]
        expected = (1 - smoothing) * exact - smoothing * log_probabilities.mean(-1)
        expected += z_weight * log_z**2
        self.assertEqual(loss.dtype, tf.float32)
        self.assertAllClose(float(loss), expected.mean(), rtol=1e-5, atol=0)
        self.assertAllClose(float(metrics.cross_entropy[0]), exact.mean(), rtol=1e-5, atol=0)
        right = (logits.argmax(-1) == labels).mean()
        self.assertAllClose(float(metrics.accuracy[0]), right, rtol=1e-6, atol=0)
        self.assertEqual(float(metrics.tokens[0]), float(metrics.loss[1]))
        self.assertEqual(float(metrics.loss[1]), len(labels))
        self.assertEqual(len(labels), 11)

    def test_the_gradient_of_the_z_loss_matches_the_formula(self):
        task = task_of(z_loss_weight=0.05, label_smoothing=0.1)
        theta, batch = task.init(1), tensors(batch_of())

        def gradients(loss_of_pass):
            with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
                tape.watch(theta.flatten())
                loss = loss_of_pass()
            return tape.gradient(loss, theta.flatten())

        def by_formula():
            logits = tf.boolean_mask(task.logits(theta, batch), SEGMENTS > 0)
            log_z = tf.reduce_logsumexp(logits, -1)
            labels = tf.one_hot(batch_of()["target_labels"][SEGMENTS > 0], V) * 0.9 + 0.1 / V
            exact = tf.reduce_sum(labels * (log_z[:, None] - logits), -1)
            return tf.reduce_mean(exact + 0.05 * tf.square(log_z))

        found = gradients(lambda: task.loss(theta, batch)[0])
        for one, expected in zip(found, gradients(by_formula), strict=True):
            self.assertAllClose(
                tf.convert_to_tensor(one), tf.convert_to_tensor(expected), rtol=1e-7, atol=2e-6
            )

    def test_padding_has_no_effect(self):
        task, batch = task_of(), batch_of()
        other = dict(batch)
        for name in ("target_inputs", "target_labels"):
            other[name] = np.where(SEGMENTS > 0, batch[name], 5).astype(np.int32)
        losses = []
        for each in (batch, other):
            with context.scope(training=False):
                losses.append(float(task.loss(task.init(1), tensors(each))[0]))
        self.assertEqual(losses[0], losses[1])


class LanguageModelTest(testing.TestCase, parameterized.TestCase):
    def test_a_loop_after_dense_layers_equals_separate_layers(self):
        values = MODELS["experts after a dense layer"]
        one_by_one, looped = task_of(**values), task_of(**values, decoder__execution=loop())
        batch = batch_of()
        self.assertAllClose(
            logits_of(looped, batch), logits_of(one_by_one, batch), rtol=1e-7, atol=1e-6
        )
        for task in (one_by_one, looped):
            kinds = [
                (isinstance(layer.feed_forward, MixtureOfExperts), times)
                for layer, times in task.decoder.layer_counts()
            ]
            self.assertEqual(
                [moe for moe, times in kinds for _ in range(times)], [False, True, True]
            )
            unrolled = task.decoder.unrolled(task.init(1).decoder)
            self.assertEqual(len(unrolled), 3)

    def test_flops_match_the_count_by_hand(self):
        task = task_of()
        layer = 2 * B * L * (4 * M * M + 2 * M * 12) + 4 * B * (L * (L + 1) // 2) * M
        expected = 3 * (2 * layer + 2 * B * L * M * V)
        self.assertEqual(FORWARD_AND_BACKWARD * flops(task, TokenShape(B, L)), expected)

    @parameterized.parameters(
        (
            {"decoder": TransformerStack.params().set(is_decoder=True)},
            "task.decoder of a language model",
        ),
        ({"decoder__is_causal": False}, "needs is_causal = True and is_decoder = False"),
        ({"decoder__dense_first": 3}, r"decoder.dense_first: 3 is not in 0 to .*num_layers, 2"),
        (
            {"decoder__dense_first": 1, "decoder__moe_every": 2, "decoder__execution": loop()},
            "decoder.execution: Repeat needs a multiple of 2 layers",
        ),
        ({"positions": LearnedPositions.params().set(max_length=4)}, "positions.max_length: 4"),
    )
    def test_errors_name_the_invalid_option(self, values, words):
        with self.assertRaisesRegex(ValueError, words):
            logits_of(task_of(**values), batch_of())


if __name__ == "__main__":
    testing.main()
