"""Tests PackedBatches: frequencies of sentences, and exact resumption."""

import collections
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching import batches
from lingvo_gshard.data.batching.packing import SentencePairs, Tokens

COUNT = 150


def stream(seed=1, rows=4, window=60, identity="x"):
    numbers = np.random.default_rng(0)
    # The first token names the sentence; the rest is its length.
    make = lambda longest: Tokens.concatenate(  # noqa: E731
        [[10 + i] + [3] * numbers.integers(0, longest) + [2] for i in range(COUNT)]
    )
    members = {"de": np.arange(100), "fr": np.arange(100, COUNT)}
    mixture = batches.Mixture(members, 2.0, window, seed)
    pairs = SentencePairs(make(14), make(10), (rows, 32, 24))
    return batches.PackedBatches(pairs, mixture, identity)


def same(one, other):
    return (
        all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    )


def sentences_of(batch):
    starts = (batch["target_positions"] == 0) & (batch["target_segments"] > 0)
    return batch["target_labels"][starts] - 10


def test_every_sentence_is_eventually_batched():
    s = stream()
    seen = collections.Counter()
    for _ in range(400):
        seen.update(sentences_of(next(s)).tolist())
    for members in (range(100), range(100, COUNT)):
        counts = [seen[i] for i in members]
        # One for the current epoch and one for the sentences carried over.
        assert max(counts) - min(counts) <= 2


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 60), st.integers(0, 4), st.sampled_from([5, 60]))
def test_resumes_exactly(steps, depth, window):
    first = batches.Prefetcher(stream(window=window), depth)
    for _ in range(steps):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected = [next(first) for _ in range(12)]
    second = batches.Prefetcher(stream(window=window), depth)
    next(second)
    second.set_state(state)
    assert second.get_state() == state
    assert all(same(next(second), batch) for batch in expected)
    assert second.get_state() == first.get_state()
    first.close()
    second.close()


def test_batches_depend_on_the_seed():
    one, again, other = (next(stream(seed)) for seed in (1, 1, 2))
    assert same(one, again)
    assert not same(one, other)


def test_a_batch_can_be_larger_than_a_block():
    s = stream(rows=32, window=20)
    filled = [np.count_nonzero(next(s)["source_segments"][:, 0]) for _ in range(5)]
    assert filled == [32] * 5


def test_rejects_the_state_of_another_stream():
    state = stream(identity="a").get_state()
    with pytest.raises(ValueError, match="belongs to another stream.*'a' there, 'b' here"):
        stream(identity="b").set_state(state)


def test_restoring_a_late_position_needs_no_replay():
    s = stream()
    s.set_state(s.get_state() | {"block": 10**9, "batch": 1})
    batch = next(s)
    assert s.get_state()["block"] == 10**9
    assert len(sentences_of(batch)) > 4
