# tests: wings/fine_tuning/conversations/preference_input.py
# tests: wings/fine_tuning/conversations/reader.py
"""Tests reading and packing pairs of answers."""

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.fine_tuning.conversations.preference_input import PreferenceInput
from tests.fine_tuning.conversations import chat_models
from tests.fine_tuning.conversations.test_conversation_input import pieces_of

ROWS, LENGTH, PAIRS = 2, 32, 2
PREFERENCES = (
    {"prompt": "w6 w7", "chosen": " w8", "rejected": " w9 w10"},
    {
        "prompt": chat_models.turns("w11"),
        "chosen": chat_models.turns("w11", "w12 w13")[1:],
        "rejected": chat_models.turns("w11", "w14")[1:],
    },
    {
        "chosen": chat_models.turns("w15", "w16", "w17", "w18"),
        "rejected": chat_models.turns("w15", "w16", "w17", "w19 w20"),
    },
)
# Tokens of the chosen and the rejected text of each pair, and how many at their end count.
TEXTS = (
    (((1, 6, 7, 8, 2), 2), ((1, 6, 7, 9, 10, 2), 3)),
    (((1, 4, 11, 3, 5, 12, 13, 3), 3), ((1, 4, 11, 3, 5, 14, 3), 2)),
    (
        ((1, 4, 15, 3, 5, 16, 3, 4, 17, 3, 5, 18, 3), 2),
        ((1, 4, 15, 3, 5, 16, 3, 4, 17, 3, 5, 19, 20, 3), 3),
    ),
)


def preferences(folder, **settings):
    """Returns an input of PREFERENCES with a small model's vocabulary."""
    if not (folder / "model").exists():
        chat_models.write(folder / "model")
    file = str(chat_models.write_lines(folder / "pairs.jsonl", PREFERENCES))
    p = PreferenceInput.params().set(batch_rows=ROWS, length=LENGTH, pairs_per_row=PAIRS)
    p.set(**settings)
    p.corpus.train = p.corpus.dev = (file,)
    found = p.instantiate()
    found.load_vocabularies(folder / "model")
    return found


def test_both_texts_of_a_pair_are_segments_of_one_row(tmp_path):
    found = preferences(tmp_path)
    specs = PreferenceInput.batch_specs(found.p)
    seen = []
    for batch in found.evaluation_batches("dev"):
        assert batch.keys() == specs.keys()
        assert all(array.shape == tuple(specs[name].shape) for name, array in batch.items())
        pairs = batch.pop("pairs")
        np.testing.assert_array_equal(2 * pairs.sum(1), batch["target_segments"].max(1))
        texts = pieces_of(batch)
        seen += zip(texts[::2], texts[1::2], strict=True)
    expected = [
        tuple(
            (ids[:-1], ids[1:], (0,) * (len(ids) - 1 - count) + (1,) * count) for ids, count in pair
        )
        for pair in TEXTS
    ]
    assert sorted(seen) == sorted(expected)
    (first,) = {type(a) for a in (next(found.train_batches(1))["pairs"],)}
    assert first is np.ndarray


def test_a_row_has_no_more_pairs_than_it_has_places(tmp_path):
    found = preferences(tmp_path, length=128, pairs_per_row=1)
    assert all((b["target_segments"] <= 2).all() for b in found.evaluation_batches("dev"))
    with pytest.raises(UserError, match=r"input\.truncate is True"):
        preferences(tmp_path, truncate=True)
