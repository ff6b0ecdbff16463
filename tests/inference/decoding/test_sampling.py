"""Compares draws with exact probabilities, and with those of transformers."""

import json

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.wings.inference.decoding import sampling
from tests.inference.decoding import peer_samplers

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def probabilities(logits, temperature, top_k, top_p, min_p):
    """Returns the probability of each token."""
    scaled = np.float64(logits) / temperature
    order = np.argsort(-scaled)
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    kept, total = [], 0.0
    among = probability[order[: top_k or None]].sum()
    for token in order[: top_k or None]:
        if total >= top_p * among:
            break
        if probability[token] >= min_p * probability.max():
            kept.append(token)
        total += probability[token]
    found = np.zeros(len(scaled))
    found[kept] = probability[kept] / probability[kept].sum()
    return found


def columns(count, **options):
    """Returns the options of `count` equal rows, as `sampling.warp` takes them."""
    values, dtypes = {**PLAIN, **options}, {"top_k": tf.int32}
    return [tf.fill([count], tf.cast(v, dtypes.get(n, tf.float32))) for n, v in values.items()]


def take(logits, count, seed=5, **options):
    """Returns `count` draws, in rows that have all options."""
    rows = tf.range(count)
    key = tf.tile([[seed, 6]], [count, 1])
    uniform = sampling.uniform(logits.shape[-1], rows, key, tf.zeros_like(rows))
    rows_BV = tf.tile(logits[None], [count, 1])
    return sampling.take(rows_BV, *columns(count, **options), uniform).numpy()


@pytest.mark.parametrize("number", range(peer_samplers.CASES + 1))
def test_distributions_are_those_of_transformers(number):
    case = json.loads(peer_samplers.FILE.read_text(encoding="utf-8"))["cases"][number]
    expected = case.pop("probabilities")
    logits = np.float32([case.pop("logits")])
    found = tf.nn.softmax(tf.cast(sampling.warp(logits, *columns(1, **case)), tf.float64))
    np.testing.assert_allclose(found[0], expected, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8},
        {"top_k": 1},
    ],
    ids=str,
)
def test_token_frequencies_match_their_probabilities(options):
    logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
    count = 20_000
    shares = np.bincount(take(logits, count, **options), minlength=8) / count
    expected = probabilities(logits, **{**PLAIN, **options})
    # With 20,000 draws, 4.5 standard deviations of a frequency are at most 0.016.
    np.testing.assert_allclose(shares, expected, atol=0.016)
    assert (shares[expected == 0] == 0).all()


def test_temperature_0_takes_the_likeliest_token():
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)
    assert set(take(logits, 20, temperature=0.0)) == {int(np.argmax(logits))}


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [2]), (2, [2, 5]), (3, [2, 5, 6]), (4, [0, 2, 5, 6])]
)
def test_of_equal_logits_the_first_are_kept(top_k, kept):
    logits = np.array([1.0, -0.0, 3.0, 1.0, 0.0, 3.0, 3.0], np.float32)
    for temperature in (1.0, 30.0):
        assert set(take(logits, 300, top_k=top_k, temperature=temperature)) == set(kept)
    # Each of the three best has 0.297 of the probability.
    share = {1: 0.2, 2: 0.5, 3: 0.8}.get(top_k)
    assert share is None or set(take(logits, 300, top_p=share)) == set(kept)


def test_zeros_are_equal_whatever_their_sign():
    logits = np.array([-1.0, -0.0, 0.0, -1.0], np.float32)
    assert set(take(logits, 50, top_k=1)) == set(take(logits, 50, top_p=1e-6)) == {1}


def test_the_best_one_is_that_of_greedy_decoding_in_bfloat16():
    draws = np.random.default_rng(3).normal(size=(120, 300)) * 2
    logits = tf.cast(tf.cast(draws, tf.bfloat16), tf.float32)
    rows = tf.range(120)
    random = sampling.uniform(300, rows, tf.tile([[1, 2]], [120, 1]), rows)
    ones, zeros = tf.ones(120), tf.zeros(120)
    first = np.argmax(logits, 1)
    top_k = sampling.take(logits, ones, tf.ones_like(rows), ones, zeros, random)
    top_p = sampling.take(logits, 1.7 * ones, tf.zeros_like(rows), 1e-6 * ones, zeros, random)
    np.testing.assert_array_equal(top_k, first)
    np.testing.assert_array_equal(top_p, first)
    # Some rows have several best tokens.
    assert (np.sum(logits == np.max(logits, 1, keepdims=True), 1) > 1).any()


def test_rows_have_options_of_their_own():
    logits = np.array([[3.0, 2.9, -5.0]] * 400, np.float32)
    rows = tf.range(400)
    uniform = sampling.uniform(3, rows, tf.tile([[1, 2]], [400, 1]), rows)
    top_k = tf.where(rows < 200, 1, 0)
    ones, zeros = tf.ones(400), tf.zeros(400)
    found = sampling.take(logits, ones, top_k, ones, zeros, uniform).numpy()
    assert set(found[:200]) == {0} and set(found[200:]) == {0, 1}


def test_seen_tokens_are_penalized():
    logits = tf.constant([[2.0, -2.0, 1.0]])
    found = sampling.penalize_seen(logits, tf.constant([[1, 1, 0]]), tf.constant([2.0]))
    np.testing.assert_array_equal(found, [[1.0, -4.0, 1.0]])
