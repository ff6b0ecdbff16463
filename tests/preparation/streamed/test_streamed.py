# tests: wings/preparation/streamed/blocks.py, wings/preparation/streamed/examples.py
# tests: wings/preparation/streamed/inputs.py
"""Tests inputs that stream data sets of Hugging Face, against the rows and from every position."""

import collections
import itertools
import json
import os

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.preparation.streamed.inputs import (
    StreamedLanguageModelInput,
    StreamedTranslationInput,
)
from tests.preparation import raw

# The library reads this when it is imported: without it, an unknown name is looked for elsewhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")

ROWS = raw.rows(150)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Writes the rows as JSON lines in three files and by save_to_disk; returns the folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    objects = [{"id": 7, "translation": {"en": c, a: b}} for a, b, c in ROWS]
    for part in range(3):
        lines = "".join(json.dumps(each) + "\n" for each in objects[part::3])
        (tmp_path / f"part{part}.jsonl").write_text(lines)
    texts = datasets.Dataset.from_dict({"text": [c for _, _, c in ROWS]})
    texts.save_to_disk(tmp_path / "texts", num_shards=2)
    columns = dict(zip(("language", "source", "target"), zip(*ROWS, strict=True), strict=True))
    splits = {"train": columns, "validation": {name: c[:9] for name, c in columns.items()}}
    whole = {name: datasets.Dataset.from_dict(each) for name, each in splits.items()}
    datasets.DatasetDict(whole).save_to_disk(tmp_path / "pairs")
    return tmp_path


def make(cls, folder, path, dataset=None, **values):
    """Returns an input with small blocks and batches; `dataset` has values of its data set."""
    params = cls.params().set(batch_rows=2, block_rows=40, packing_window=16, prefetch_batches=0)
    if cls is StreamedTranslationInput:
        params.set(source_length=96, target_length=64)
    params.vocabulary.set(size=330, cache_directory=str(folder / "cache"))
    params.dataset.set(path=path)
    if path == "json":
        params.dataset.set(data_files=(str(folder / "part*.jsonl"),))
    params.dataset.set(**(dataset or {}))
    return params.set(**values).instantiate()


KINDS = {
    "streamed": (StreamedTranslationInput, "json"),
    "on disk": (StreamedTranslationInput, "pairs"),
    "texts": (StreamedLanguageModelInput, "texts"),
}


def make_kind(folder, kind, dataset=None, **values):
    """Returns an input of one of KINDS."""
    cls, path = KINDS[kind]
    path = path if path == "json" else str(folder / path)
    return make(cls, folder, path, dataset, **values)


def decoded(input_, batch):
    """Returns the targets of a batch as text."""
    found = []
    vocabulary = input_.sides["target"][1]
    for labels, segments in zip(batch["target_labels"], batch["target_segments"], strict=True):
        for number in range(1, segments.max() + 1):
            found.append(vocabulary.decode(labels[segments == number].tolist()))
    return found


def same(batch, other):
    """Returns whether two batches are equal to the bit, with their digests."""
    assert batch.keys() == other.keys()
    equal = all(np.array_equal(batch[name], other[name]) for name in batch)
    return equal and batch.digest == other.digest


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_each_row_once_and_other_orders(corpus, kind):
    input_ = make_kind(corpus, kind)
    batches = input_.train_batches(seed=1)
    epochs, orders, current = [], [], []
    while len(epochs) < 2:
        before = batches.position.epoch
        current += decoded(input_, next(batches))
        if batches.position.epoch > max(before, len(epochs)):
            # The batch is the first one of the next epoch.
            continue
        if len(current) >= len(ROWS):
            epochs.append(collections.Counter(current[: len(ROWS)]))
            orders.append(current[: len(ROWS)])
            current = current[len(ROWS) :]
    assert epochs == [collections.Counter(c for _, _, c in ROWS)] * 2
    assert orders[0] != orders[1]
    assert "whole epochs: " in input_.usage_notes()[0]


@pytest.mark.parametrize("prefetched", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_any_position_to_the_bit(corpus, kind, prefetched):
    whole = make_kind(corpus, kind, prefetch_batches=prefetched).train_batches(seed=1)
    count = 40 if kind != "texts" else 25
    states, expected = [json.dumps(whole.get_state())], []
    for _ in range(count):
        expected.append(next(whole))
        states.append(json.dumps(whole.get_state()))
    whole.close()
    for place in range(0, count, 3 if not prefetched else 9):
        resumed = make_kind(corpus, kind, prefetch_batches=prefetched).train_batches(seed=1)
        resumed.set_state(json.loads(states[place]))
        assert json.dumps(resumed.get_state()) == states[place]
        for batch in expected[place : place + 4]:
            assert same(next(resumed), batch)
        resumed.close()


def test_other_seeds_and_settings_are_refused(corpus):
    batches = make_kind(corpus, "streamed").train_batches(seed=1)
    next(batches)
    state = batches.get_state()
    for other in (
        make_kind(corpus, "streamed").train_batches(seed=2),
        make_kind(corpus, "streamed", block_rows=41).train_batches(seed=1),
    ):
        with pytest.raises(UserError, match="belongs to another stream"):
            other.set_state(state)


def test_dev_rows_are_read_in_order(corpus):
    input_ = make_kind(corpus, "on disk", {"dev": "validation"}, evaluation_rows=7)
    input_.check_split("dev")
    assert input_.splits == ("train", "dev")
    assert [row[:3] for row in input_.rows("dev")] == ROWS[:7]
    found = list(itertools.chain(*(decoded(input_, b) for b in input_.evaluation_batches("dev"))))
    assert sorted(found) == sorted(c for _, _, c in ROWS[:7])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "input.dataset.path is empty"),
        ({"path": "no_such_format"}, "input.dataset.path = 'no_such_format' cannot be read"),
        ({"train": "trian"}, "input.dataset.train = 'trian'. Did you mean 'train'"),
        ({"source_field": "src"}, "example 1: a field|expected text in 'src' and 'target'"),
    ],
)
def test_mistakes_are_told_before_training(corpus, values, message):
    input_ = make_kind(corpus, "on disk", values)
    with pytest.raises(UserError, match=message):
        input_.check_split("train")


def test_bad_examples_are_skipped_if_asked_and_an_empty_epoch_ends(corpus):
    path = corpus / "bad.jsonl"
    path.write_text('{"source": "a b", "target": "c d"}\n{"source": "a b", "target": null}\n')
    skips = {"dataset": {"data_files": (str(path),)}, "on_bad_row": "skip"}
    input_ = make(StreamedTranslationInput, corpus, "json", **skips)
    assert [row[:3] for row in input_.rows("train")] == [("und", "a b", "c d")]
    short = make(StreamedTranslationInput, corpus, "json", **skips | {"source_length": 2})
    short.load_vocabularies(saved(corpus))
    with pytest.raises(UserError, match="no row of a whole epoch fits"):
        next(short.train_batches(seed=1))


def saved(corpus):
    """Returns a directory with vocabularies."""
    directory = corpus / "vocabularies"
    directory.mkdir()
    make_kind(corpus, "on disk").save_vocabularies(directory)
    return directory
