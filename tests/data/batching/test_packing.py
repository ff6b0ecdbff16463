# tests: data/batching/packing.py, data/batching/stream.py, api/training.py
"""Tests packing: every token once, in order, in the segment of its translation."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard.api.training import share_filled
from lingvo_gshard.data.batching import mixture_plan
from lingvo_gshard.data.batching.packing import BOS_ID, EOS_ID, Tokens
from lingvo_gshard.data.batching.stream import Assembly
from lingvo_gshard.data.batching.table import MemoryTable

L, K, B = 12, 9, 3

_PAIRS = st.lists(
    st.tuples(
        st.lists(st.integers(4, 99), max_size=L - 1), st.lists(st.integers(4, 99), max_size=K - 1)
    ),
    max_size=40,
)


def tables(pairs):
    return tuple(Tokens.concatenate([pair[side] + [EOS_ID] for pair in pairs]) for side in (0, 1))


def in_order(sources, targets, shape):
    """Yields batches with each pair once, as evaluation does."""
    table, rows = MemoryTable(sources, targets, [""] * len(sources)), np.arange(len(sources))
    assembly = Assembly(table, [shape], BOS_ID, True)
    pieces = mixture_plan.whole_rows(rows, table.lengths_of(rows))
    for planned in mixture_plan.in_order(iter([pieces]), shape, 0, window=10):
        yield assembly.batch(planned, assembly.read([planned]))


def unpack(batch):
    """Returns (source, target) of all segments of a batch, row by row."""
    pairs = []
    for row in range(batch["source_ids"].shape[0]):
        sides = []
        for ids, prefix in (("source_ids", "source"), ("target_labels", "target")):
            sentences = {}
            cells = zip(
                *(batch[n][row] for n in (ids, f"{prefix}_segments", f"{prefix}_positions")),
                strict=True,
            )
            previous = 0
            for token, segment, position in cells:
                if segment == 0:
                    assert token == position == 0
                    continue
                # Segments are in order and without gaps.
                assert segment in (previous, previous + 1)
                previous = segment
                assert position == len(sentences.setdefault(segment, []))
                sentences[segment].append(token)
            sides.append(sentences)
        assert sides[0].keys() == sides[1].keys()
        pairs += [(sides[0][segment], sides[1][segment]) for segment in sides[0]]
    return pairs


@hypothesis.given(_PAIRS)
def test_every_token_is_packed_once(pairs):
    sources, targets = tables(pairs)
    batches = list(in_order(sources, targets, (B, L, K)))
    found = [pair for batch in batches for pair in unpack(batch)]
    expected = [(s + [EOS_ID], t + [EOS_ID]) for s, t in pairs]
    assert sorted(found) == sorted(expected)
    for batch in batches:
        assert all(array.dtype == np.int32 for array in batch.values())
        assert batch["source_ids"].shape == (B, L) and batch["target_labels"].shape == (B, K)


@hypothesis.given(_PAIRS)
def test_decoder_inputs_are_labels_shifted_by_bos(pairs):
    sources, targets = tables(pairs)
    for batch in in_order(sources, targets, (B, L, K)):
        for row in range(B):
            for column in range(K):
                token = batch["target_inputs"][row, column]
                if batch["target_segments"][row, column] == 0:
                    assert token == 0
                elif batch["target_positions"][row, column] == 0:
                    assert token == BOS_ID
                else:
                    assert token == batch["target_labels"][row, column - 1]


def test_packing_efficiency_is_the_share_of_positions_with_tokens():
    sources, targets = tables([([5] * 5, [6] * 4), ([9] * 11, [10] * 8)])
    (batch,) = in_order(sources, targets, (2, L, K))
    assert sorted(unpack(batch)) == sorted(
        [([9] * 11 + [2], [10] * 8 + [2]), ([5] * 5 + [2], [6] * 4 + [2])]
    )
    assert share_filled(batch) == (12 + 9 + 6 + 5) / (2 * (L + K))


def test_counts_tokens():
    table = Tokens.concatenate([[1, 2], [], [3]])
    ended = table.with_end(9)
    assert ended.ids.tolist() == [1, 2, 9, 9, 3, 9] and ended.lengths.tolist() == [3, 1, 2]
    assert len(table) == 3
    assert table.lengths.tolist() == [2, 0, 1]
    assert table.gather(np.array([2, 1, 0, 2])).tolist() == [3, 1, 2, 3]
    assert table.gather(np.zeros(0, np.int64)).tolist() == []
    taken = table.take(np.array([2, 1, 0]))
    assert taken.ids.tolist() == [3, 1, 2] and taken.lengths.tolist() == [1, 0, 2]
    assert table.lengths_of(np.array([2, 0])).tolist() == [1, 2]
