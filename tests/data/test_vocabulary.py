"""Tests Vocabulary: lossless encoding, special ids, and saving."""

import os

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer
from tests.data import corpora


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return corpora.trainer(tmp_path_factory.mktemp("cache")).train(corpora.rows(200), 1.0)[0]


def test_special_ids(made):
    assert (made.pad_id, made.bos_id, made.eos_id, made.unk_id) == (0, 1, 2, 3)
    assert [made.piece(i) for i in range(4)] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert made.size == corpora.SIZE


@hypothesis.given(st.text())
def test_round_trip_of_any_text(made, text):
    text = Normalizer()(text)
    # The character that represents a space cannot be encoded itself.
    hypothesis.assume("\u2581" not in text)
    ids = made.encode(text)
    assert all(4 <= i < made.size for i in ids)
    assert made.decode(ids) == text


def test_batch_encoding_equals_line_by_line_encoding(made):
    texts = ["Guten Tag", "", "日本 x"]
    assert made.encode_batch(texts) == [made.encode(text) for text in texts]


def test_decoding_stops_at_eos_and_skips_padding(made):
    ids = made.encode("der Hund")
    assert made.decode([1, *ids, 2, *ids, 0]) == "der Hund"
    assert made.decode([0, 0, *ids, 0]) == "der Hund"
    assert made.decode([2]) == ""


def test_sampled_pieces_spell_the_same_texts(tmp_path):
    made = corpora.trainer(tmp_path, size=400).train(corpora.rows(200), 1.0)[0]
    texts = [row.source for row in corpora.rows(200)]
    sampled = made.sample_batch(texts, alpha=0.1, seed=1)
    assert [made.decode(ids) for ids in sampled] == texts
    assert sampled == made.sample_batch(texts, alpha=0.1, seed=1)
    likeliest = made.encode_batch(texts)
    changed = {
        alpha: sum(a != b for a, b in zip(made.sample_batch(texts, alpha, 2), likeliest, strict=1))
        for alpha in (0.0, 0.1, 100.0)
    }
    assert changed[0.0] > changed[0.1] > changed[100.0] == 0
    assert sampled != made.sample_batch(texts, alpha=0.1, seed=2)


def test_save_and_load(made, tmp_path):
    path = made.save(str(tmp_path / "new" / "directory"), "v")
    assert os.path.basename(path) == "v.model"
    loaded = Vocabulary.load(str(tmp_path / "new" / "directory"), "v")
    assert loaded == made and loaded.encode("der Hund") == made.encode("der Hund")
    assert os.listdir(tmp_path / "new" / "directory") == ["v.model"]


def test_pairs(made, tmp_path):
    other = corpora.trainer(tmp_path, joint=False, size=290).train(corpora.rows(200), 1.0)[1]
    files.save_pair(str(tmp_path / "joint"), made, made)
    source, target = files.load_pair(str(tmp_path / "joint"))
    assert source is target and source == made
    files.save_pair(str(tmp_path / "apart"), made, other)
    assert files.load_pair(str(tmp_path / "apart")) == (made, other)
    assert made != other


def test_load_errors(tmp_path):
    with pytest.raises(ValueError, match="vocabulary.model is missing; copy the whole directory"):
        Vocabulary.load(str(tmp_path))
    (tmp_path / "vocabulary.model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="vocabulary.model: This is no SentencePiece model"):
        Vocabulary.load(str(tmp_path))
