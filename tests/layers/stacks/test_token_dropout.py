# tests: layers/stacks/transformer.py, layers/norm.py
"""Tests token dropout: what a stack computes, and gradients that do not grow with depth."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.norm import LayerNorm, RMSNorm
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Constant
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.attention.attention_reference import attention

B, L, M, RATE = 4, 16, 8, 0.3
SEGMENTS = np.array([[1] * 9 + [2] * 5 + [0] * 2] * B, np.int32)


def stack(num_layers: int = 1, **values):
    p = TransformerStack.params().set(
        num_layers=num_layers, num_heads=2, hidden_dim=16, moe_every=0
    )
    return p.set(model_dim=M, is_causal=True, **values).instantiate(path="stack")


def rows() -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32))


def with_zeros(x_BLM: tf.Tensor) -> np.ndarray:
    """Returns the input with tokens dropped by a layer of its own, but no segment's first token."""
    dropout = Dropout.params().set(rate=RATE, whole_vectors=True)
    x_BLM = dropout.instantiate(path="stack.token_dropout").fprop(NestedMap(), rows()).numpy()
    for b, segments in enumerate(SEGMENTS):
        for i, segment in enumerate(segments):
            if i == 0 or segments[i - 1] != segment:
                x_BLM[b, i] = rows()[b, i]
    return x_BLM


def in_numpy(layer, theta: dict, x_BLM: np.ndarray) -> np.ndarray:
    """Returns the output of a dense causal stack in float64, from its weights by path."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True) if f"{name}.bias" in theta else x
        inverse = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return centered * inverse * theta[f"{name}.scale"] + theta.get(f"{name}.bias", 0)

    for index, part in enumerate(layer.layers_in_order()):
        name = f"layers[{index}]"
        prefix = f"{name}.self_attention."
        weights = {k.removeprefix(prefix): w for k, w in theta.items() if k.startswith(prefix)}
        x_BLM = x_BLM + attention(
            part.self_attention.p,
            NestedMap(weights),
            norm(f"{name}.self_attention_norm", x_BLM),
            SEGMENTS,
            lambda b, q, k: k <= q and SEGMENTS[b, k] == SEGMENTS[b, q],
        )
        hidden = norm(f"{name}.feed_forward_norm", x_BLM) @ theta[f"{name}.feed_forward.w_in"]
        hidden = np.maximum(hidden + theta[f"{name}.feed_forward.b_in"], 0)
        x_BLM = x_BLM + hidden @ theta[f"{name}.feed_forward.w_out"]
        x_BLM = x_BLM + theta[f"{name}.feed_forward.b_out"]
    return norm("final_norm", x_BLM)


class TokenDropoutTest(testing.TestCase, parameterized.TestCase):
    def test_a_stack_computes_what_it_would_with_zeros_for_dropped_tokens(self):
        dropping, plain = stack(token_dropout_rate=RATE), stack()
        theta, x_BLM = plain.init(1), rows()
        with context.scope(training=True, seed=tf.constant([5, 0])):
            found = dropping.fprop(theta, x_BLM, tf.constant(SEGMENTS))
            kept_BLM = with_zeros(x_BLM)
        dropped = (kept_BLM == 0).all(-1)
        self.assertBetween(dropped.sum(), 1, dropped.size - 1)
        self.assertFalse(dropped[:, [0, 9, 14]].any())
        expected = plain.fprop(theta, tf.constant(kept_BLM), tf.constant(SEGMENTS))
        self.assertAllClose(found, expected, rtol=1e-7, atol=1e-6)
        without = plain.fprop(theta, x_BLM, tf.constant(SEGMENTS))
        self.assertGreater(np.abs(found - without).max(), 0.1)
        with context.scope(training=False):
            evaluated = dropping.fprop(theta, x_BLM, tf.constant(SEGMENTS))
        self.assertAllEqual(evaluated, without)

    @parameterized.parameters(LayerNorm, RMSNorm)
    def test_the_gradient_is_that_of_float64_and_stays_small_in_depth(self, norm):
        """Guards against the infinite gradient of eight layers that drop first tokens."""
        dropping = stack(8, token_dropout_rate=RATE)
        dropping = dropping.p.copy()
        dropping.layer.norm = norm.params()
        dropping = dropping.instantiate(path="stack")
        theta = dropping.init(1)
        direction_BLM = np.random.default_rng(2).normal(size=(B, L, M)).astype(np.float32)
        direction_BLM[SEGMENTS == 0] = 0
        with context.scope(training=True, seed=tf.constant([5, 0])), tf.GradientTape() as tape:
            tape.watch(theta.flatten())
            y_BLM = dropping.fprop(theta, rows(), tf.constant(SEGMENTS))
            loss = tf.reduce_sum(y_BLM * direction_BLM) / B / L
            kept_BLM = with_zeros(rows())
        gradient = tape.gradient(loss, theta.flatten())
        length = float(tf.linalg.global_norm(gradient))
        self.assertLess(length, 10)

        def loss_at(step: float) -> float:
            """Returns the loss after a step of this length along the gradient."""
            moved = {
                path: np.asarray(w, np.float64) + step * np.asarray(g, np.float64) / length
                for (path, w), g in zip(theta.flatten_items(), gradient, strict=True)
            }
            y_BLM = in_numpy(dropping, moved, kept_BLM.astype(np.float64))
            return (y_BLM * direction_BLM).sum() / B / L

        self.assertAllClose(loss_at(0), loss, rtol=1e-4, atol=0)
        self.assertAllClose((loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, length, rtol=1e-3, atol=0)

    @parameterized.parameters(LayerNorm, RMSNorm)
    @pytest.mark.slow
    def test_float16_trains_as_float32(self, norm):
        """Guards against NaN gradients of dropped tokens, which shrink the loss scale to 0."""
        ids_BL = np.random.default_rng(0).integers(3, 32, (8, 12)).astype(np.int32)
        batch = {
            "target_inputs": ids_BL,
            "target_labels": np.roll(ids_BL, -1, 1),
            "target_segments": np.ones_like(ids_BL),
            "target_positions": np.tile(np.arange(12, dtype=np.int32), (8, 1)),
        }
        steps = {}
        for precision in ("float16", "float32"):
            task = LanguageModelTask.params().set(vocabulary_size=32, model_dim=16)
            task.decoder.set(num_layers=4, num_heads=4, hidden_dim=32, moe_every=0)
            task.decoder.token_dropout_rate = RATE
            task.decoder.layer.norm = norm.params()
            trainer = Trainer.params().set(
                optimizer=Adam.params(),
                clip_norm=1.0,
                schedule=Constant.params().set(learning_rate=4e-3),
                precision=precision,
            )
            runtime = SingleDeviceRuntime(trainer.instantiate(task))
            runtime.init_state()
            steps[precision] = [runtime.train_step(batch).read() for _ in range(8)]
        self.assertEqual(steps["float16"][-1]["skipped_steps"], 0)
        self.assertLess(steps["float32"][-1]["loss"], steps["float32"][0]["loss"] - 0.2)
        for half, single in zip(steps["float16"], steps["float32"], strict=True):
            self.assertAllClose(half["loss"], single["loss"], rtol=5e-3, atol=0)
            self.assertAllClose(half["gradient_norm"], single["gradient_norm"], rtol=0.1, atol=0)


if __name__ == "__main__":
    testing.main()
