"""Tests decoding batches: few shapes, every sentence once, and results in order."""

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching import decoding_batches
from tests.data import corpora


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return corpora.trainer(tmp_path_factory.mktemp("cache")).train(corpora.rows(200), 1.0)[0]


@hypothesis.given(
    st.lists(st.text("abc ", max_size=30).map(lambda text: " ".join(text.split())), max_size=30)
)
def test_results_are_returned_in_the_original_order(made, sentences):
    batches = decoding_batches.decoding_batches(sentences, made, (4, 8, 32), batch_tokens=16)
    results = []
    for batch in batches:
        ids, segments = batch.arrays["source_ids"], batch.arrays["source_segments"]
        assert ids.shape in {(4, 4), (2, 8), (1, 32)}
        lengths = segments.sum(1)
        assert ((lengths == 0) == (batch.indices < 0)).all()
        for row, length in enumerate(lengths):
            assert (ids[row, length:] == 0).all() and (segments[row, :length] == 1).all()
            assert batch.arrays["source_positions"][row, :length].tolist() == list(range(length))
            assert length == 0 or ids[row, length - 1] == made.eos_id
        results.append([made.decode(row) for row in ids])
    assert not batches.cut
    assert batches.in_order(results) == sentences


def test_uses_the_smallest_length_that_fits(made):
    ids = made.encode("der Hund sieht")
    for length in (len(ids), len(ids) + 1):
        (batch,) = decoding_batches.decoding_batches(["der Hund sieht"], made, (length, 99), 99)
        assert batch.arrays["source_ids"].shape[1] == (99 if length == len(ids) else length)


def test_long_sentences_are_truncated_and_reported(made):
    text = "Hund " * 20
    batches = decoding_batches.decoding_batches(["Katze", text], made, (8,), 16)
    assert batches.cut == (1,)
    (batch,) = batches
    row = batch.arrays["source_ids"][batch.indices.tolist().index(1)]
    assert row.tolist() == made.encode(text)[:7] + [made.eos_id]


def test_errors(made):
    for lengths in ((), (0, 4)):
        with pytest.raises(ValueError, match="lengths must be positive"):
            decoding_batches.decoding_batches(["a"], made, lengths)
