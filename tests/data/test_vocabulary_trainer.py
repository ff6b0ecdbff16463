"""Tests VocabularyTrainer: deterministic training and its cache."""

import os
import threading

import pytest
import sentencepiece

from lingvo_gshard.data import vocabulary_trainer
from lingvo_gshard.data.sources.row import Row
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
    sentences = {"big": [f"b{i}" for i in range(1000)], "small": [f"s{i}" for i in range(250)]}
    flat = vocabulary_trainer._sample(sentences, 400, 1e9)
    assert len(set(flat)) == len(flat) == 399
    assert sum(line.startswith("s") for line in flat) == 199
    as_is = vocabulary_trainer._sample(sentences, 400, 1.0)
    assert sum(line.startswith("s") for line in as_is) == 80
    assert vocabulary_trainer._sample(sentences, 1250, 5.0) == sum(sentences.values(), [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "unigramm"}, "vocabulary.model_type .* Did you mean 'unigram'"),
        ({"target_size": 100}, "vocabulary.target_size needs vocabulary.joint = False"),
    ],
)
def test_option_errors(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        corpora.trainer(tmp_path, **values)


@pytest.mark.parametrize("size", [100, 8000])
def test_rejects_vocabulary_sizes_that_the_text_cannot_fill(tmp_path, size):
    params = vocabulary_trainer.VocabularyTrainer.params()
    params.set(size=size, cache_directory=str(tmp_path))
    with pytest.raises(ValueError, match=f"input.vocabulary.size = {size} does not suit"):
        params.instantiate().train(corpora.rows(200), 1.0)
