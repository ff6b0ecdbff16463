# tests: wings/services/routers/token_kinds.py, core/token_kinds.py
"""Tests the kinds of tokens: their classes by the vocabulary, their languages by the batch."""

import numpy as np
import pytest

from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.batching.table import Group
from lingvo_gshard.wings.services.routers.token_kinds import (
    CLASSES,
    Languages,
    classes_of,
    kinds_of,
)


class Pieces:
    """A vocabulary of given pieces, after pad, bos, eos and unk."""

    pad_id, bos_id, eos_id, unk_id = range(4)
    before, end_ids = (1,), (2,)
    source_start, target_start = (), (1,)

    def __init__(self, pieces):
        self._pieces = ["<pad>", "<s>", "</s>", "<unk>", *pieces]
        self.size = len(self._pieces)

    def piece(self, index):
        return self._pieces[index]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("▁house", "first piece"),
        ("▁", "first piece"),
        ("▁3D", "first piece"),
        ("ing", "continuation"),
        ("л", "continuation"),
        ("▁2024", "digits"),
        ("7", "digits"),
        ("٣", "digits"),
        (".", "punctuation"),
        ("▁(%", "punctuation"),
        ("。", "punctuation"),
        ("<0xE3>", "byte"),
        ("<2de>", "tag"),
        ("__de__", "tag"),
        ("deu_Latn", "tag"),
        ("de_DE", "tag"),
        (">>deu<<", "tag"),
        ("<|im_start|>", "tag"),
    ],
)
def test_class_of_a_piece(piece, expected):
    found = classes_of(Pieces([piece]))
    assert CLASSES[found[4]] == expected
    names = [CLASSES[i] for i in found[:4]]
    assert names == ["unknown", "start of text", "end of sentence", "unknown"]


def _groups(*languages):
    """Returns groups of two rows each."""
    return [Group(name, "", 2 * index, 2, (9, 9)) for index, name in enumerate(languages)]


def test_rows_of_an_unknown_language_are_not_counted_as_another():
    assert Languages.of(_groups("und"), "und").names == ()
    assert Languages.of([], "und").names == ()
    mixed = Languages.of(_groups("de", "und"), "und")
    assert [mixed.names[number] for number in mixed.numbers] == ["de", "und"]


def test_languages_follow_the_segments_of_a_batch():
    # Rows 0 and 1 are Spanish, 2 and 3 Dutch.
    languages = Languages.of(_groups("es", "nl"))
    assert languages.names == ("es", "nl")
    segments = np.array([[1, 1, 2, 0], [1, 2, 3, 3], [0, 0, 0, 0]], np.int32)
    ids = np.array([[4, 5, 4, 0], [5, 5, 5, 2], [0, 0, 0, 0]], np.int32)
    arrays = {"source_ids": ids, "source_segments": segments}
    rows, examples = np.array([0, 0, 1, 1, 1]), np.array([1, 3, 2, 0, 2])
    batch = PackedBatch.of(arrays, rows, examples)
    assert batch.examples.tolist() == [[-1, 1, 3, -1], [-1, 2, 0, 2], [-1, -1, -1, -1]]
    found = kinds_of(batch, {"source": ("source_ids", Pieces(["▁a", "7"]))}, languages)
    assert found.languages == ("es", "nl") and found.classes == CLASSES
    kinds = found.arrays["source_kinds"]
    assert kinds.dtype == np.int32
    real = segments > 0
    es, nl = 0, 1
    assert (kinds // len(CLASSES))[real].tolist() == [es, es, nl, nl, es, nl, nl]
    classes = [CLASSES[i] for i in (kinds % len(CLASSES))[real]]
    first, digits, end = "first piece", "digits", "end of sentence"
    assert classes == [first, digits, first, digits, digits, digits, end]


def test_examples_without_a_language_and_other_batches_have_classes_only():
    side = {"source": ("source_ids", Pieces(["▁a"]))}
    ids = {"source_ids": np.array([[4]]), "source_segments": np.array([[1]])}
    unnamed = Languages.of(_groups(""))
    batch = PackedBatch.of(ids, np.array([0]), np.array([0]))
    assert kinds_of(batch, side, unnamed).languages == ()
    assert kinds_of(ids, side, Languages.of(_groups("es"))).languages == ()
    assert kinds_of(ids, side, unnamed).arrays["source_kinds"].tolist() == [[0]]
