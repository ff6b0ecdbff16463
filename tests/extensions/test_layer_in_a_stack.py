# tests: core/layer.py, layers/stacks/transformer_layer.py, layers/stacks/execution.py
"""Tests that a layer with `fprop` alone trains and decodes as the feed-forward layer of a stack."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import Layer, context, initializers, layer_method
from lingvo_gshard.layers import Sequential
from lingvo_gshard.sharding import einsum
from lingvo_gshard.wings.inference.decoding.precision import INT8_WEIGHTS, stored_weights
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

EXECUTIONS = {
    "sequential": Sequential.params(),
    "repeat": Repeat.params(),
    "pipeline": Pipeline.params().set(stages=2),
}


class Gated(Layer):
    """x w_out, scaled for each position. It has no `hidden_dim`, and nothing but `fprop`."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim}
        self.create_variable("w_gate", "M", sizes, initializers.normal(1.0))
        self.create_variable("b", "M", sizes, initializers.normal(1.0))

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        del mask_BL
        gate_BL = tf.sigmoid(einsum("BLM,M->BL", x_BLM, theta.w_gate))
        return tf.tanh(x_BLM * gate_BL[:, :, tf.newaxis] + theta.b)


def model_of(execution):
    values = {"decoder__moe_every": 0, "decoder__layer__feed_forward": Gated.params()}
    return tiny_engine.language_model(**values, decoder__execution=EXECUTIONS[execution])


@pytest.mark.parametrize(
    "execution",
    [
        "repeat",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "pipeline")),
    ],
)
def test_it_decodes_what_the_whole_model_computes(execution):
    model = model_of(execution)
    prompts = [[BOS, 5, 7], [BOS, 4]]
    greedy = DecodingOptions(beam_size=1, most_tokens=6)
    beam = DecodingOptions(beam_size=2, most_tokens=4, length_exponent=0.0)
    with model.engine(workers=1) as engine:
        for prompt in prompts:
            (found,) = engine.submit(Request((), tuple(prompt), greedy)).result()
            tokens, gains = tiny_engine.plain_greedy(model, [], prompt, 6)
            assert list(found.tokens) == [t for t in tokens if t != EOS]
            np.testing.assert_allclose(found.log_probabilities, gains, rtol=1e-3, atol=1e-4)
        (best, *_) = engine.submit(Request((), tuple(prompts[0]), beam)).result()
    ended = tiny_engine.plain_beam(model, [], prompts[0], 4, 2)
    _, tokens, _ = tiny_engine.ranked(ended, 0.0)[0]
    assert list(best.tokens) == [t for t in tokens if t != EOS]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_all_of_its_weights_train(execution):
    model = model_of(execution)
    ids = np.array([[BOS, 5, 7, 3], [BOS, 4, 9, 8]], np.int32)
    batch = tiny_engine._packed("target", ids) | {"target_inputs": ids}
    batch = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    with tf.GradientTape() as tape, context.scope(training=True, seed=tf.constant([1, 0])):
        tape.watch(model.theta.flatten())
        logits = tf.reduce_sum(tf.square(model.task.logits(model.theta, batch)))
    gradients = tape.gradient(logits, model.theta.flatten())
    paths = [path for path, _ in model.theta.flatten_items()]
    found = dict(zip(paths, gradients, strict=True))
    own = {path: found[path] for path in paths if path.endswith((".w_gate", "feed_forward.b"))}
    assert own and all(np.abs(gradient).max() > 0 for gradient in own.values())


def test_int8_leaves_its_weights_as_they_are():
    model = model_of("sequential")
    layers = stored_weights(model.task, model.theta, INT8_WEIGHTS).decoder.layers
    trained = [theta for _, theta in model.task.decoder.unrolled(model.theta.decoder)]
    for stored, theta in zip(layers, trained, strict=True):
        np.testing.assert_array_equal(stored.feed_forward.w_gate, theta.feed_forward.w_gate)
