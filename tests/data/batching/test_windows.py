"""Tests windows: documents are split into rows, and every token is predicted once."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import BOS_ID, EOS_ID, Tokens
from lingvo_gshard.data.batching.windows import Windows

LENGTH, ROWS = 6, 3


def made(lengths):
    """Returns documents of these lengths; all tokens except EOS are unique."""
    ids = iter(range(10, 10_000))
    return [[next(ids) for _ in range(length - 1)] + [EOS_ID] for length in lengths]


def windows_of(documents):
    return Windows.cut(Tokens.concatenate(documents), (ROWS, LENGTH), BOS_ID)


def test_long_documents_are_split_with_their_context():
    documents = made([3, 14, 6])
    windows = windows_of(documents)
    assert windows.labels.lengths.tolist() == [3, 6, 6, 2, 6]
    assert windows.documents.tolist() == [0, 1, 1, 1, 2]
    long = documents[1]
    assert windows.before.tolist() == [BOS_ID, BOS_ID, long[5], long[11], BOS_ID]


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(st.integers(1, 20), min_size=1, max_size=25))
def test_every_token_is_a_label_once_and_follows_its_predecessor(lengths):
    documents = made(lengths)
    windows = windows_of(documents)
    expected = sorted(
        (before, label)
        for document in documents
        for before, label in zip([BOS_ID, *document], document, strict=False)
    )
    found = []
    for batch in packing.in_order(windows, np.arange(len(windows.labels))):
        real = batch["target_segments"] > 0
        assert all(value.shape == (ROWS, LENGTH) for value in batch.values())
        assert all(value.dtype == np.int32 for value in batch.values())
        assert not any(value[~real].any() for value in batch.values())
        inputs, labels = batch["target_inputs"][real], batch["target_labels"][real]
        found += zip(inputs.tolist(), labels.tolist(), strict=True)
        check_positions(batch)
    assert sorted(found) == expected


def check_positions(batch):
    """Asserts that segments start from 1 in each row and positions from 0 in each segment."""
    for segments, positions in zip(
        batch["target_segments"], batch["target_positions"], strict=True
    ):
        real = segments[segments > 0]
        assert (segments[: len(real)] == real).all()
        assert sorted(set(real)) == list(range(1, len(set(real)) + 1))
        for number in set(real):
            mine = positions[segments == number]
            assert mine.tolist() == list(range(len(mine)))
