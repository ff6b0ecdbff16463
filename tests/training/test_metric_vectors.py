"""Checks that the metric vector names stacked layers like separate layers."""

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gshard.core.repetition import Repetition, unstacked
from lingvo_gshard.training.step.metric_vectors import (
    StepMetrics,
    metric_vector,
    pair_with_weights,
    values_and_weights,
)


@given(
    body=st.integers(1, 4),
    times=st.integers(1, 5),
    data=st.data(),
    rest=st.sampled_from(["", "/dropped", ".moe/loss", ".a[3].b"]),
)
def test_stacked_metric_names_expand_to_layer_names(body, times, data, rest):
    repetition = Repetition("encoder.layers", body, times)
    path = f"encoder.layers.body[{data.draw(st.integers(0, body - 1))}]{rest}"
    assert unstacked(repetition.stacked(path), times) == repetition.paths(path)


def test_loop_metrics_have_the_names_of_their_layers():
    metrics = [
        ("loss", tf.constant(1.5)),
        ("layers[1::2]/dropped", tf.constant([0.25, 0.5, 0.75])),
        ("tokens", tf.constant(7.0)),
    ]
    names, values = metric_vector(metrics)
    assert names == ["loss", *(f"layers[{i}]/dropped" for i in (1, 3, 5)), "tokens"]
    np.testing.assert_array_equal(values, [1.5, 0.25, 0.5, 0.75, 7.0])


def test_metric_weights_follow_values_under_separate_names():
    pairs = {
        "loss": (tf.constant(1.5), tf.constant(6.0)),
        "layers[0::1]/load": (tf.constant([0.25, 0.5]), tf.constant([2.0, 4.0])),
    }
    names, values = metric_vector(values_and_weights(pairs))
    read = StepMetrics(names, values.numpy).read()
    assert pair_with_weights(read) == {
        "loss": (1.5, 6.0),
        "layers[0]/load": (0.25, 2.0),
        "layers[1]/load": (0.5, 4.0),
    }
    assert dict(zip(names, values.numpy().tolist(), strict=True)) == {
        "loss": 1.5,
        "layers[0]/load": 0.25,
        "layers[1]/load": 0.5,
        "loss weight": 6.0,
        "layers[0]/load weight": 2.0,
        "layers[1]/load weight": 4.0,
    }
