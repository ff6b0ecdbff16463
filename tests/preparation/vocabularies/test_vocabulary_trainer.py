"""Tests VocabularyTrainer: deterministic training and its cache."""

import os
import threading

import pytest
import sentencepiece

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.vocabularies import vocabulary_trainer
from tests.data import corpora


@pytest.fixture
def trainings(monkeypatch):
    """Returns a list that grows with every training."""
    counted = []
    train = sentencepiece.SentencePieceTrainer.train

    def counting(*args, **kwargs):
        counted.append(kwargs["vocab_size"])
        return train(*args, **kwargs)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", counting)
    return counted


def test_vocabularies_can_be_joint_or_separate(tmp_path, trainings):
    rows = corpora.rows(200)
    source, target = corpora.trainer(tmp_path).train(rows, 1.0)
    assert source is target
    source, target = corpora.trainer(tmp_path, joint=False, size=295, target_size=290).train(
        rows, 1.0
    )
    assert (source.size, target.size) == (295, 290)
    assert trainings == [300, 295, 290]


def test_the_cache_is_keyed_by_content(tmp_path, trainings):
    rows = corpora.rows(200)
    first = corpora.trainer(tmp_path).train(rows, 1.0)
    assert corpora.trainer(tmp_path).train(rows[::-1], 1.0) == first
    assert len(trainings) == 1
    corpora.trainer(tmp_path).train(rows + [Row("de", "ganz neu", "quite new")], 1.0)
    corpora.trainer(tmp_path, model_type="bpe").train(rows, 1.0)
    assert len(trainings) == 3
    assert len(os.listdir(tmp_path)) == 3


def test_training_is_deterministic(tmp_path):
    rows = corpora.rows(300)
    one, other = (corpora.trainer(tmp_path / name).train(rows, 1.0)[0] for name in "ab")
    assert one == other


def test_a_damaged_cache_entry_is_retrained(tmp_path):
    first = corpora.trainer(tmp_path).train(corpora.rows(200), 1.0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert corpora.trainer(tmp_path).train(corpora.rows(200), 1.0) == first


def test_concurrent_trainings_share_the_cache(tmp_path):
    results = []
    train = lambda: results.append(  # noqa: E731
        corpora.trainer(tmp_path).train(corpora.rows(200), 1.0)
    )
    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unwritable_cache_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    vocabulary, _ = corpora.trainer(tmp_path / "file" / "cache").train(corpora.rows(200), 1.0)
    assert vocabulary.size == corpora.SIZE


def test_sampling_is_bounded_and_follows_the_temperature():
    sentences = {
        "big": [f"b{i:03}" for i in range(1000)],
        "small": [f"s{i:03}" for i in range(250)],
    }
    flat = vocabulary_trainer._sample(sentences, 4 * 400, 1e9)
    assert 399 <= len(set(flat)) == len(flat) <= 400
    assert 199 <= sum(line.startswith("s") for line in flat) <= 200
    as_is = vocabulary_trainer._sample(sentences, 4 * 400, 1.0)
    assert sum(line.startswith("s") for line in as_is) == 80
    assert vocabulary_trainer._sample(sentences, 4 * 1250, 5.0) == sum(sentences.values(), [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "unigramm"}, "model_type is 'unigramm'; expected .*'unigram'"),
        ({"target_size": 100}, "vocabulary.target_size needs vocabulary.joint = False"),
    ],
)
def test_option_errors(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        corpora.trainer(tmp_path, **values)


def _text_of_many_characters():
    """Returns rows with 600 Chinese characters, the frequent ones in most rows."""
    frequent = "".join(map(chr, range(0x4E00, 0x4E20)))
    rows = [Row("zh", f"{frequent[i % 32 :]}{frequent}", f"word {i % 9}") for i in range(200)]
    rare = map(chr, range(0x5000, 0x5238))
    return rows + [Row("zh", f"{frequent[:3]}{character}", "rare") for character in rare]


def test_many_scripts_leave_room_for_pieces(tmp_path):
    trainer = corpora.trainer(tmp_path, size=360)
    rows = _text_of_many_characters()
    vocabulary, _ = trainer.train(rows, 1.0)
    pieces = [vocabulary.piece(i) for i in range(260, vocabulary.size)]
    single = sum(len(piece) == 1 for piece in pieces)
    assert single <= 100
    for row in (rows[0], rows[-1]):
        ids = vocabulary.encode(row.source)
        assert vocabulary.unk_id not in ids and vocabulary.decode(ids) == row.source
    note = trainer.notes[0]
    assert note.startswith("The 100 most frequent of 6") and "input.vocabulary.size = " in note


def test_many_scripts_without_bytes_name_the_size_they_need(tmp_path):
    trainer = corpora.trainer(tmp_path, byte_fallback=False)
    message = (
        r"size = 300 is too small: .* at least \d{4}, or input.vocabulary.byte_fallback = True"
    )
    with pytest.raises(ValueError, match=message):
        trainer.train(_text_of_many_characters(), 1.0)


def test_little_text_gives_a_smaller_vocabulary_and_says_so(tmp_path):
    for rows in (corpora.rows(200), [Row("de", "Ja", "Yes")], [Row("de", "a" * 6000, "A" * 9)]):
        trainer = corpora.trainer(tmp_path, size=8000)
        vocabulary, _ = trainer.train(rows, 1.0)
        assert 260 < vocabulary.size < 8000
        assert f"The vocabulary has {vocabulary.size:,} ids" in trainer.notes[-1]
        assert vocabulary.decode(vocabulary.encode(rows[0].source)) == rows[0].source


def test_no_text_and_too_small_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no text to train a vocabulary on"):
        corpora.trainer(tmp_path).train([], 1.0)
    message = "size = 100 is too small: 4 ids are special and 256 stand for bytes .* at least 400"
    with pytest.raises(ValueError, match=message):
        corpora.trainer(tmp_path, size=100).train(corpora.rows(200), 1.0)


def test_a_vocabulary_of_nfkc_converts_texts(tmp_path):
    trainer = corpora.trainer(tmp_path)
    trainer.unicode_form = "NFKC"
    vocabulary = trainer.train(corpora.rows(200), 1.0)[0]
    plain = corpora.trainer(tmp_path).train(corpora.rows(200), 1.0)[0]
    assert vocabulary.encode("ｔｈｅ ﬁ") == vocabulary.encode("the fi")
    assert plain.encode("ｔｈｅ") != plain.encode("the") == vocabulary.encode("the")
