# tests: data/language_model_input.py, data/corpus_input.py, data/input.py, data/stages.py
# tests: training/experiments.py
"""Tests LanguageModelInput: deterministic, resumable batches of documents."""

import json

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.data.batching.packing import EOS_ID
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.training.experiments import make_trainer
from lingvo_gshard.wings.services.routers.token_kinds import kinds_in
from tests.data import corpora


def documents(count):
    """Returns documents of one to three lines, some longer than a row."""
    lines = [row.target for row in corpora.rows(3 * count)]
    return ["\n".join(lines[3 * i : 3 * i + 1 + i % 3]) for i in range(count)]


def params(directory, **values):
    """Returns the Params of an input, after writing its files."""
    for split, texts in (("train", documents(120)), ("dev", ["a red cat", "un été\nfroid ☃"])):
        (directory / f"{split}.txt").write_text("\n\n".join(texts), encoding="utf-8")
    corpus = TextReader.params()
    corpus.set(train=f"{directory}/train.txt", dev=f"{directory}/dev.txt")
    p = LanguageModelInput.params().set(corpus=corpus, batch_rows=4, length=16, packing_window=50)
    p.cleaning.drop_duplicates = False
    p.vocabulary.set(size=280, cache_directory=f"{directory}/cache")
    return p.set(**values)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def made(directory):
    return params(directory).instantiate()


def test_lines_that_are_taken_for_one_paragraph_have_a_way_out(directory):
    text = directory / "lines.txt"
    text.write_text("\n".join(row.target for row in corpora.rows(300)), encoding="utf-8")
    p = params(directory)
    p.corpus.set(train=str(text), dev=())
    one = p.instantiate()
    assert len(one.rows("train")) == 1
    assert "With input.corpus.document = 'line', each line is a document." in one.notes[-1]
    p.corpus.document = "line"
    lines = p.instantiate()
    assert len(lines.rows("train")) > 100 and "each line is a document" not in str(lines.notes)


def test_batches_match_the_spec_and_are_full(made):
    batches = made.train_batches(1)
    batch = next(batches)
    specs = made.batch_specs(made.p)
    assert {name: tf.TensorSpec(value.shape, value.dtype) for name, value in batch.items()} == specs
    assert np.mean(batch["target_segments"] > 0) > 0.9
    batches.close()


def test_batches_depend_on_the_seed(made, directory):
    other = params(directory).instantiate()
    first, second, third = made.train_batches(1), other.train_batches(1), other.train_batches(2)
    same, differs = [], []
    for _ in range(6):
        one, two, three = next(first), next(second), next(third)
        same.append(all(np.array_equal(one[name], two[name]) for name in one))
        differs.append(not np.array_equal(one["target_labels"], three["target_labels"]))
    assert all(same) and any(differs)
    for batches in (first, second, third):
        batches.close()


def test_resumes_from_its_state_and_rejects_other_data(made, directory):
    batches = made.train_batches(3)
    for _ in range(25):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches) for _ in range(10)]
    batches.set_state(state)
    for batch in expected:
        again = next(batches)
        assert all(np.array_equal(batch[name], again[name]) for name in batch)
    batches.close()
    for values in ({"length": 17}, {"packing_window": 51}, {"batch_rows": 5}):
        other = params(directory, **values).instantiate().train_batches(3)
        with pytest.raises(ValueError, match="belongs to another stream"):
            other.set_state(state)
        other.close()


def test_an_epoch_contains_every_document_once(made):
    """Counts EOS tokens over many epochs."""
    batches, ends = made.train_batches(1), 0
    for _ in range(120):
        ends += np.count_nonzero(next(batches)["target_labels"] == EOS_ID)
    batches.close()
    tokens = made.table("train").targets.ids
    share = np.count_nonzero(tokens == EOS_ID) / len(tokens)
    assert ends / (120 * 4 * 16) == pytest.approx(share, rel=0.15)


def test_rows_have_as_many_texts_as_may_be(directory):
    """Each row's segments are 1, 2, ... in order and then padding, as attention by cuDNN reads."""
    limited = params(directory, length=64, most_segments=2).instantiate()
    free = params(directory, length=64).instantiate()
    assert limited.packing == (50, 2) and free.packing == (50,)
    counts = []
    for made in (limited, free):
        batches = made.train_batches(1)
        segments = np.concatenate([next(batches)["target_segments"] for _ in range(6)])
        batches.close()
        steps = np.diff(segments, axis=1)
        assert (segments[:, 0] <= 1).all() and (steps[segments[:, 1:] > 0] >= 0).all()
        assert (steps <= 1).all()
        counts.append(segments.max())
    assert counts[0] == 2 < counts[1]
    tokens = [
        sum(np.count_nonzero(batch["target_segments"]) for batch in made.evaluation_batches("dev"))
        for made in (limited, free)
    ]
    assert tokens[0] == tokens[1]


def test_attention_knows_the_most_texts_of_a_row():
    for settings, expected in (([], 0), (["input.most_segments = 16"], 16)):
        experiment = lingvo_gshard.experiment("language_model.quickstart", settings=settings)
        trainer = make_trainer(experiment)
        kernels = [
            node.most_segments
            for _, node in trainer.task.p.nodes()
            if "most_segments" in node and node.cls is DenseKernel
        ]
        assert kernels and set(kernels) == {expected}
        # The experiment itself stays as it is.
        assert {n.most_segments for _, n in experiment.task.nodes() if "most_segments" in n} == {0}


def test_evaluation_covers_the_whole_text(directory):
    """Bits per byte cover the whole text, including characters that are not in the vocabulary."""
    made = params(directory, length=64).instantiate()
    labels = []
    for batch in made.evaluation_batches("dev"):
        real = batch["target_segments"] > 0
        labels += batch["target_labels"][real].tolist()
    ends = [i for i, label in enumerate(labels) if label == EOS_ID]
    texts = [
        made.vocabulary.decode(labels[begin:end])
        for begin, end in zip([0, *(i + 1 for i in ends)], ends, strict=False)
    ]
    assert sorted(texts) == ["a red cat", "un été\nfroid ☃"]
    assert made.count_tokens("dev") == len(labels)


def test_text_sizes_match_the_count_by_hand(made):
    size = made.text_size("dev")
    assert (size.documents, size.words) == (2, 7)
    assert size.bytes == len("a red cat") + len("un t\nfroid ") + 2 * 2 + 3


def test_a_saved_vocabulary_is_used(made, directory, tmp_path):
    made.save_vocabularies(str(tmp_path))
    other = params(directory).instantiate()
    other.vocabulary = None
    other.load_vocabularies(str(tmp_path))
    assert other.vocabulary == made.vocabulary
    assert other.count_tokens("dev") == made.count_tokens("dev")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("vocabulary.joint", False, "input.vocabulary.joint is False"),
        ("vocabulary.byte_fallback", False, "input.vocabulary.byte_fallback is False"),
    ],
)
def test_errors_name_the_invalid_option(path, value, words, directory):
    p = params(directory)
    p.set_path(path, value)
    with pytest.raises(ValueError, match=words):
        p.instantiate()


def test_tokens_have_classes_and_no_language_without_names(made):
    batches = made.train_batches(1)
    batch = next(batches)
    kinds = kinds_in(made, batch)
    assert kinds.languages == () and list(kinds.arrays) == ["target_kinds"]
    real = batch["target_segments"] > 0
    found = {kinds.classes[n] for n in kinds.arrays["target_kinds"][real]}
    assert {"first piece", "continuation", "start of text"} <= found
    batches.close()
