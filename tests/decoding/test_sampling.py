"""Compares sampling with a full forward pass for every token and with exact probabilities."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.decoding import Sampling
from lingvo_gshard.decoding.sampling import continue_texts
from lingvo_gshard.tasks.language_model import LanguageModelTask
from tests.layers.stacks.executions import loop

BOS, EOS, V, LENGTH = 1, 2, 13, 9
GREEDY = Sampling(temperature=0)
# The third row is empty; the fifth starts in the middle of a text.
BEFORE = np.array([BOS, BOS, 0, BOS, 7], np.int32)
GIVEN = np.zeros([5, LENGTH], np.int32)
GIVEN[0, :3], GIVEN[3, :1], GIVEN[4, :2] = [5, 6, 7], [9], [4, 11]
SAMPLES = np.zeros(5, np.int32)


def task_of(**values: object) -> LanguageModelTask:
    params = LanguageModelTask.params().set(vocabulary_size=V, model_dim=8)
    params.decoder.set(num_layers=2, num_heads=2, hidden_dim=16, moe_every=2)
    params.decoder.moe.set(num_experts=4, group_size=16)
    params.decoder.moe.router.evaluation_capacity_factor = 4.0
    for name, value in values.items():
        params.set_path(name.replace("__", "."), value)
    return params.instantiate()


def weights_of(task: LanguageModelTask):
    """Returns weights large enough for outputs to differ from row to row."""
    return task.init(3).transform(lambda weight: weight * 3.0)


def write(task, given, before, samples, sampling=GREEDY, seed=0, jit=None):
    def run(given, before, samples, *weights):
        theta = task.variable_specs().pack(weights)
        key = tf.constant([seed, 0])
        with context.scope(training=False):
            return continue_texts(task, theta, given, before, samples, EOS, sampling, key)

    run = run if jit is None else tf.function(run, jit_compile=jit, autograph=False)
    arrays = map(tf.constant, (given, before, samples))
    return run(*arrays, *weights_of(task).flatten()).numpy()


def decode_greedily_without_caches(task, given, before):
    """Returns the argmax of a full forward pass over each prefix, one row at a time."""
    theta, ids = weights_of(task), [before]
    for known in given:
        if len(ids) > 1 and ids[-1] == EOS:
            ids.append(EOS)
            continue
        inputs = np.array([ids], np.int32)
        batch = {
            "target_inputs": tf.constant(inputs),
            "target_segments": tf.ones_like(inputs),
            "target_positions": tf.range(len(ids))[None],
        }
        with context.scope(training=False):
            logits = task.logits(theta, batch)
        ids.append(int(known) or int(np.argmax(logits[0, -1])))
    return ids[1:]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"decoder__execution": loop(), "decoder__num_layers": 4, "tie_softmax": False},
        {
            "add_positions": False,
            "decoder__dense_first": 1,
            "decoder__moe_every": 1,
            "decoder__layer__self_attention__rotary_fraction": 1.0,
            "decoder__layer__self_attention__num_key_value_heads": 1,
            "decoder__layer__self_attention__window": 4,
        },
    ],
    ids=["experts", "loop", "rotary"],
)
def test_caches_do_not_change_results(values):
    task = task_of(**values)
    found = write(task, GIVEN, BEFORE, SAMPLES)
    for row, given, before in zip(found, GIVEN, BEFORE, strict=True):
        expected = decode_greedily_without_caches(task, given, before) if before else [EOS] * LENGTH
        assert row.tolist() == expected
    assert len({tuple(row) for row in found}) == len(found)


def test_compiled_draws_equal_eager_ones():
    task, sampling = task_of(), Sampling(0.8, top_k=9, top_p=0.95)
    found = [write(task, GIVEN, BEFORE, SAMPLES, sampling, jit=jit) for jit in (None, True)]
    np.testing.assert_array_equal(*found)


def test_a_row_depends_only_on_its_sample_and_the_seed():
    task, sampling = task_of(), Sampling(1.5)
    found = write(task, GIVEN, BEFORE, SAMPLES, sampling)
    alone = [
        write(task, GIVEN[i : i + 1], BEFORE[i : i + 1], SAMPLES[:1], sampling)[0] for i in range(5)
    ]
    np.testing.assert_array_equal(found, alone)
    four = np.zeros([4, LENGTH], np.int32), np.full(4, BOS, np.int32), np.arange(4, dtype=np.int32)
    samples = [write(task, *four, sampling, seed=seed) for seed in (0, 1)]
    assert len({tuple(row) for row in np.concatenate(samples)}) == 8


def probabilities(logits, sampling):
    """Returns the probability of each token after temperature, top-k and top-p."""
    scaled = np.float64(logits) / sampling.temperature
    order = np.argsort(-scaled)
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    kept, total = [], 0.0
    for rank, token in enumerate(order):
        if sampling.top_k and rank >= sampling.top_k or total >= sampling.top_p:
            break
        kept.append(token)
        total += probability[token]
    found = np.zeros(len(scaled))
    found[kept] = probability[kept] / probability[kept].sum()
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(2.0, top_k=6, top_p=0.8),
    ],
    ids=str,
)
def test_token_frequencies_match_their_probabilities(sampling):
    logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
    count = 20_000
    words = tf.cast(tf.range(count), tf.uint32)
    drawn = sampling.take(tf.tile(logits[None], [count, 1]), words, tf.constant([5, 6]))
    shares = np.bincount(drawn, minlength=8) / count
    # With 20,000 draws, 4.5 standard deviations of a frequency are at most 0.016.
    np.testing.assert_allclose(shares, probabilities(logits, sampling), atol=0.016)
    expected = probabilities(logits, sampling)
    assert all(expected[token] > 0 for token in collections.Counter(drawn.numpy().tolist()))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; 0 or more"),
        ({"top_k": -2}, "top_k is -2; 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; more than 0"),
        ({"top_p": 1.5}, "top_p is 1.5; more than 0 and at most 1"),
    ],
)
def test_rejects_invalid_options(values, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**values)
