"""Compares beam search with a plain loop that runs the full model for every hypothesis."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.decoding import beam_decode, greedy_decode
from tests.decoding import tiny_model
from tests.decoding.tiny_model import BOS, EOS, SOURCES

LENGTH = 5


def next_log_probabilities(task, theta, source, hypotheses):
    """Returns log probabilities [hypothesis, V] of the next token; all have the same length."""
    inputs = np.array([[BOS, *tokens] for tokens in hypotheses], np.int32)
    source = np.repeat(source, len(hypotheses), axis=0)
    batch = {
        "source_ids": source,
        "source_segments": np.ones_like(source),
        "source_positions": np.broadcast_to(np.arange(source.shape[1]), source.shape),
        "target_inputs": inputs,
        "target_segments": np.ones_like(inputs),
        "target_positions": np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape),
    }
    return tf.nn.log_softmax(task.logits(theta, batch)[:, -1]).numpy()


def plain_beam_search(task, theta, source_ids, beam_size, exponent, limit):
    source = np.array([[i for i in source_ids if i]], np.int32)
    beam = [((), 0.0, False)]
    rank = lambda h: h[1] / ((5 + len(h[0])) / 6) ** exponent  # noqa: E731
    while not all(ended for *_, ended in beam):
        grown = [hypothesis for hypothesis in beam if hypothesis[2]]
        going_on = [hypothesis for hypothesis in beam if not hypothesis[2]]
        gains = next_log_probabilities(task, theta, source, [tokens for tokens, *_ in going_on])
        for (tokens, score, _), row in zip(going_on, gains, strict=True):
            for token, gain in enumerate(row):
                longer = (*tokens, token)
                grown.append((longer, score + gain, token == EOS or len(longer) == limit))
        beam = sorted(grown, key=rank, reverse=True)[:beam_size]
    best = list(beam[0][0])
    return (best + [EOS] * LENGTH)[:LENGTH]


def decode(task, theta, beam_size, exponent, limits, jit):
    @tf.function(jit_compile=jit, autograph=False)
    def run(ids, weights, limit):
        with context.scope(training=False):
            model = theta.pack(weights)
            return beam_decode(task, model, ids, LENGTH, BOS, EOS, limit, beam_size, exponent)

    return run(tf.constant(SOURCES), theta.flatten(), tf.constant(limits)).numpy()


@pytest.mark.parametrize(
    ("beam_size", "exponent", "jit"),
    [
        (2, 0.0, False),
        pytest.param(3, 1.0, True, marks=pytest.mark.slow),
        pytest.param(4, 0.6, False, marks=pytest.mark.slow),
    ],
)
def test_equals_a_plain_beam_search(beam_size, exponent, jit):
    task = tiny_model.task()
    theta = tiny_model.theta(task, 1)
    limits = [LENGTH, LENGTH, LENGTH, 3, LENGTH]
    decoded = decode(task, theta, beam_size, exponent, limits, jit)
    for row, limit, tokens in zip(SOURCES, limits, decoded, strict=True):
        expected = [EOS] * LENGTH
        if row.any():
            expected = plain_beam_search(task, theta, row, beam_size, exponent, limit)
        assert tokens.tolist() == expected


def test_a_beam_of_one_is_greedy():
    task = tiny_model.task()
    theta = tiny_model.theta(task, 2)
    limits = [LENGTH, LENGTH, LENGTH, 3, 1]
    greedy = greedy_decode(
        task, theta, tf.constant(SOURCES), LENGTH, BOS, EOS, tf.constant(limits)
    ).numpy()
    np.testing.assert_array_equal(decode(task, theta, 1, 1.0, limits, jit=False), greedy)
