# tests: tasks/language_model.py
"""Compares multi-token prediction of a language model with each document by itself."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import decoding_weights
from tests.tasks.test_language_model import POSITIONS, SEGMENTS, B, L, M, V, task_of, tensors

ROTARY = {"add_positions": False, "decoder__layer__self_attention__rotary_fraction": 1.0}


def weights(task) -> NestedMap:
    rng = np.random.default_rng(2)
    return task.init(1).transform(lambda w: w + (0.3 * rng.normal(size=w.shape)).astype("f4"))


def batch() -> dict:
    """Returns packed documents, in which labels are the inputs one position later."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, V, (B, L + 1)).astype(np.int32)
    labels = ids[:, 1:].copy()
    # The label of a document's last position is not the next document's first input.
    labels[0, 2], labels[0, 4] = 2, 2
    return {
        "target_inputs": ids[:, :-1] * (SEGMENTS > 0),
        "target_labels": labels * (SEGMENTS > 0),
        "target_segments": SEGMENTS,
        "target_positions": POSITIONS,
    }


def loss_of(task, theta, arrays, training=True):
    with context.scope(training=training, seed=tf.constant([1, 2])) as scope:
        loss, _ = task.loss(theta, tensors(arrays))
    return float(loss), scope


def by_document(task, theta, arrays) -> list[float]:
    """Returns the mean cross-entropy of each module, computed for one document at a time."""
    sums, count = np.zeros(task.p.future_tokens), np.zeros(task.p.future_tokens)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        chosen = np.flatnonzero(SEGMENTS[row] == segment)
        inputs, labels = (arrays[f"target_{n}"][row, chosen] for n in ("inputs", "labels"))
        one = {
            "target_inputs": inputs[None],
            "target_segments": np.ones((1, len(chosen)), np.int32),
            "target_positions": np.arange(len(chosen), dtype=np.int32)[None],
        }
        state = task._states(theta, tensors(one))
        for k, (module, its) in enumerate(zip(task.future, theta.future, strict=True)):
            length = len(chosen) - k - 1
            if length < 1:
                break
            ids = tf.constant(inputs[None, k + 1 :])
            token = task.embed("embedding", theta, ids, tf.range(length)[None])
            ones = tf.ones([1, length], tf.int32)
            state, output = module.fprop(its, state[:, :length], token, ones)
            logits = task.output_logits(theta, output)[0].numpy().astype(np.float64)
            log_z = np.log(np.exp(logits).sum(-1))
            sums[k] += (log_z - logits[np.arange(length), labels[k + 1 :]]).sum()
            count[k] += length
    return list(sums / count)


class FutureTokensTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 2)
    def test_losses_are_those_of_each_document(self, count):
        task = task_of(future_tokens=count, future_weight=0.6, **ROTARY)
        theta, arrays = weights(task), batch()
        plain, _ = loss_of(task, theta, arrays, training=False)
        loss, scope = loss_of(task, theta, arrays)
        expected = by_document(task, theta, arrays)
        for k, value in enumerate(expected):
            (found, tokens) = scope.metrics[f"future[{k}]/cross_entropy"]
            self.assertAllClose(float(found), value, rtol=1e-4, atol=0)
            self.assertEqual(float(tokens), [8, 5][k])
        self.assertAllClose(loss, plain + 0.6 * np.mean(expected), rtol=1e-4, atol=0)

    def test_evaluation_and_decoding_do_without_the_modules(self):
        task, plain = task_of(future_tokens=1, **ROTARY), task_of(**ROTARY)
        theta = weights(task)
        without = NestedMap({name: value for name, value in theta.items() if name != "future"})
        self.assertEqual(without.keys(), plain.init(1).keys())
        evaluated, scope = loss_of(task, theta, batch(), training=False)
        self.assertEqual(evaluated, loss_of(plain, without, batch(), training=False)[0])
        self.assertFalse(scope.losses)
        self.assertNotIn("future", decoding_weights(task, theta))

    def test_the_modules_have_experts_as_the_last_layer_has(self):
        experts = {"decoder__moe_every": 2, "decoder__moe__group_size": 4}
        task = task_of(future_tokens=1, **ROTARY, **experts)
        theta = weights(task)
        self.assertIn("router", theta.future[0].layer.feed_forward)
        _, scope = loss_of(task, theta, batch())
        self.assertTrue(
            any(name.startswith("future[0]/layer/") for name in scope.losses)
            or any("future[0].layer" in name for name in scope.losses)
        )

    def test_flops_count_the_modules_and_their_softmax(self):
        task, plain = task_of(future_tokens=2, **ROTARY), task_of(**ROTARY)
        shape = TokenShape(rows=3, length=5)
        layer = flops(task.decoder.layers[1], shape)
        more = layer + 2 * 15 * M * V + 2 * 2 * 15 * M * M
        self.assertEqual(flops(task, shape), flops(plain, shape) + 2 * more)

    def test_rejects_a_relative_bias_that_layers_share(self):
        with self.assertRaisesRegex(
            ValueError, "task.future_tokens: 1 with .*shared_relative_bias"
        ):
            task_of(future_tokens=1, decoder__shared_relative_bias__buckets=4)


if __name__ == "__main__":
    testing.main()
