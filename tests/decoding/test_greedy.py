"""Compares greedy decoding with a full forward pass for every token of a single sentence."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.decoding import greedy_decode
from tests.decoding import tiny_model
from tests.decoding.tiny_model import BOS, EOS, SOURCES

LENGTH = 9


def decode_without_caches(task, theta, source_ids, limit):
    """Returns `limit` tokens of one sentence: the argmax of the full pass over each prefix."""
    source = np.array([[i for i in source_ids if i]], np.int32)
    target = [BOS]
    while len(target) <= limit and (len(target) == 1 or target[-1] != EOS):
        inputs = np.array([target], np.int32)
        batch = {
            "source_ids": source,
            "source_segments": np.ones_like(source),
            "source_positions": np.arange(source.shape[1])[None],
            "target_inputs": inputs,
            "target_segments": np.ones_like(inputs),
            "target_positions": np.arange(inputs.shape[1])[None],
        }
        logits = task.logits(theta, batch)
        target.append(int(np.argmax(logits[0, -1])))
    return (target[1:] + [EOS] * LENGTH)[:LENGTH]


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_caches_do_not_change_results(jit):
    task = tiny_model.task()
    limits = [LENGTH, LENGTH, LENGTH, 3, LENGTH]

    @tf.function(jit_compile=jit, autograph=False)
    def decode(ids, weights, limit):
        with context.scope(training=False):
            return greedy_decode(task, theta.pack(weights), ids, LENGTH, BOS, EOS, limit)

    for seed in (1, 2):
        theta = tiny_model.theta(task, seed)
        decoded = decode(tf.constant(SOURCES), theta.flatten(), tf.constant(limits)).numpy()
        for row, limit, tokens in zip(SOURCES, limits, decoded, strict=True):
            expected = [EOS] * LENGTH
            if row.any():
                expected = decode_without_caches(task, theta, row, limit)
            assert tokens.tolist() == expected
        assert len({tuple(tokens) for tokens in decoded}) > 2


def test_the_default_limit_is_the_output_length():
    task = tiny_model.task()
    theta = tiny_model.theta(task, 3)
    unlimited = greedy_decode(task, theta, tf.constant(SOURCES), LENGTH, BOS, EOS)
    limits = tf.fill([len(SOURCES)], LENGTH)
    limited = greedy_decode(task, theta, tf.constant(SOURCES), LENGTH, BOS, EOS, limits)
    np.testing.assert_array_equal(unlimited, limited)


def test_the_loop_stops_when_all_sentences_are_complete():
    task = tiny_model.task()
    theta = tiny_model.theta(task, 1)
    steps = []
    extend = task.decode_step

    def counting(*arguments):
        steps.append(1)
        return extend(*arguments)

    task.decode_step = counting
    limits = tf.constant([2, 4, 9, 1, 1])
    greedy_decode(task, theta, tf.constant(SOURCES), LENGTH, BOS, EOS, limits)
    assert len(steps) <= 4
