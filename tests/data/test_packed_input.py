# tests: data/packed_input.py, data/batching/table.py, data/corpus_input.py
"""Tests that a table in memory gives the same batches as one on disk, for any number of hosts."""

import collections
import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching.packing import BOS_ID, Tokens
from lingvo_gshard.data.batching.table import MemoryTable
from lingvo_gshard.data.corpus_input import TokenizedRows
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.language_model_input import PreparedLanguageModelInput
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.wings.services.routers.token_kinds import kinds_in
from tests.preparation.prepared import corpora

SHAPE = {"batch_rows": 8, "source_length": 48, "target_length": 28}
# The second language is longer than a small permutation.
SIZES = {("de", "web"): (300, 9), ("es", "web"): (4200, 3), ("fr", "web"): (40, 4)}
TEXTS = {("en", "books"): (120, 5)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    pairs, texts = (tmp_path_factory.mktemp(name) for name in ("pairs", "texts"))
    corpora.prepare(pairs, SIZES)
    corpora.prepare(texts, TEXTS, content=manifest.TEXT, longest=20)
    return pairs, texts


def in_memory(data, params):
    """Returns an input with the rows of prepared data in memory.

    Args:
      data: the prepared input.
      params: Params of the input to return.
    """
    made = params.instantiate()
    if isinstance(made, TranslationInput):
        made._vocabularies = data.source_vocabulary, data.target_vocabulary
    else:
        made.vocabulary = data.vocabulary
    for split in ("train", "dev"):
        table = data.table(split)
        records = table.read(np.arange(len(table)))
        languages = [group.language for group in table.groups for _ in range(group.rows)]
        table = MemoryTable(records.sources, records.targets, languages)
        made._tokenized[split] = TokenizedRows(table, CleaningReport(split))
    return made


def of_pairs(directory, temperature=1.0, **values):
    """Returns the inputs of sentence pairs on disk and in memory."""
    values = {**SHAPE, **values}
    p = PreparedTranslationInput.params().set(directory=str(directory), **values)
    p.mixing.temperature = temperature
    data = p.instantiate()
    return data, in_memory(data, TranslationInput.params().set(temperature=temperature, **values))


def of_texts(directory, **values):
    """Returns the inputs of texts on disk and in memory."""
    p = PreparedLanguageModelInput.params().set(directory=str(directory), **values)
    data = p.instantiate()
    return data, in_memory(data, LanguageModelInput.params().set(**values))


def check_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
    np.testing.assert_array_equal(one.examples, other.examples)


def position(stream):
    state = stream.get_state()
    assert state.keys() == {"stream", "block", "batch"}
    return state["block"], state["batch"]


def check_same_streams(on_disk, memory, seed, skipped, count=12):
    """Asserts that batches and positions are the same, also after moving to a position."""
    first, second = on_disk.train_batches(seed), memory.train_batches(seed)
    for _ in range(count):
        check_same(next(first), next(second))
        assert position(first) == position(second)
    for _ in range(skipped):
        next(first)
    block, batch = position(first)
    second.set_state(second.get_state() | {"block": block, "batch": batch})
    for _ in range(count):
        check_same(next(first), next(second))
    assert position(first) == position(second)
    first.close()
    second.close()


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    seed=st.integers(0, 3),
    window=st.sampled_from([30, 200, 1000]),
    rows=st.sampled_from([3, 8, 40]),
    temperature=st.sampled_from([1.0, 2.5]),
    skipped=st.integers(0, 60),
)
def test_pairs_in_memory_and_on_disk_give_the_same_batches(
    directories, seed, window, rows, temperature, skipped
):
    inputs = of_pairs(directories[0], temperature, packing_window=window, batch_rows=rows)
    check_same_streams(*inputs, seed, skipped)


@hypothesis.settings(max_examples=6)
@hypothesis.given(seed=st.integers(0, 3), window=st.sampled_from([20, 300]))
def test_texts_that_fit_a_row_give_the_same_batches(directories, seed, window):
    inputs = of_texts(directories[1], batch_rows=4, length=64, packing_window=window)
    assert inputs[0].table("train").lengths_of(np.arange(120)).max() <= 64
    check_same_streams(*inputs, seed, 20)


def test_evaluation_and_token_kinds_are_the_same(directories):
    on_disk, memory = of_pairs(directories[0])
    for split in ("train", "dev"):
        batches = zip(
            on_disk.evaluation_batches(split), memory.evaluation_batches(split), strict=True
        )
        for one, other in batches:
            check_same(one, other)
            first, second = kinds_in(on_disk, one), kinds_in(memory, other)
            assert first.languages == second.languages == ("de", "es", "fr")
            for name, array in first.arrays.items():
                np.testing.assert_array_equal(array, second.arrays[name])


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_have_the_batches_of_one_process(directories, hosts):
    """Every host plans all batches, so own rows and digests are those of a single process."""
    alone = of_pairs(directories[0])[1].train_batches(1)
    streams = []
    for host in range(hosts):
        memory = of_pairs(directories[0])[1]
        memory.own_rows = lambda specs, host=host: (
            np.arange(specs["source_ids"].shape[0]) * hosts // 8 == host
        )
        streams.append((host, memory.train_batches(1)))
    for _ in range(10):
        expected = next(alone)
        for host, stream in streams:
            batch, own = next(stream), np.arange(8) * hosts // 8 == host
            for name, value in expected.items():
                np.testing.assert_array_equal(batch[name][own], value[own])
            check_same(batch.whole(), expected)
            assert batch.digest == expected.digest
    assert {str(stream.get_state()) for _, stream in streams} == {str(alone.get_state())}
    for stream in (alone, *(stream for _, stream in streams)):
        stream.close()


def test_windows_of_long_texts_are_drawn_one_by_one(directories):
    """A text that is longer than all others together does not fill whole blocks."""
    lengths = [5_000, 10, 30, 7]
    ids = iter(range(4, 10_000))
    texts = Tokens.concatenate([[next(ids) for _ in range(length)] for length in lengths])
    _, memory = of_texts(directories[1], batch_rows=4, length=32, packing_window=40)
    no_sources = Tokens.of(np.zeros(0, np.int32), np.zeros(4, np.int64))
    table = MemoryTable(no_sources, texts, ["en"] * 4)
    memory._tokenized["train"] = TokenizedRows(table, CleaningReport("train"))
    windows = sum(-(-length // 32) for length in lengths)
    batches, found = memory.train_batches(1), collections.Counter()
    previous = dict(zip(texts.ids[1:].tolist(), texts.ids.tolist(), strict=False))
    starts = set(texts.ids[texts.offsets[:-1]].tolist())
    while sum(found.values()) < 3 * windows:
        batch = next(batches)
        begins = (batch["target_positions"] == 0) & (batch["target_segments"] > 0)
        for label, before in zip(
            batch["target_labels"][begins], batch["target_inputs"][begins], strict=True
        ):
            found[int(label)] += 1
            assert before == (BOS_ID if label in starts else previous[int(label)])
        # A chapter of 16 blocks of 40 windows has ten full batches; its last ones may be shorter.
        assert np.count_nonzero(batch["target_segments"]) >= 32
    batches.close()
    assert len(found) == windows
    assert max(found.values()) - min(found.values()) <= 2


def test_a_position_of_an_earlier_format_is_refused_by_its_name(directories):
    _, memory = of_pairs(directories[0])
    batches = memory.train_batches(1)
    old = batches.get_state() | {"carried": [3, 4]}
    with pytest.raises(
        ValueError, match='has the format {"block", "batch", "carried"} of versions'
    ):
        batches.set_state(old)
    batches.close()


def test_a_late_position_needs_no_replay(directories):
    batches = of_pairs(directories[0], packing_window=100)[1].train_batches(1)
    batches.set_state(batches.get_state() | {"block": 10**9, "batch": 0})
    assert np.count_nonzero(next(batches)["source_segments"]) > 100
    assert position(batches)[0] >= 10**9
    batches.close()


def test_closing_stops_the_threads(directories):
    before = set(threading.enumerate())
    batches = of_pairs(directories[0])[1].train_batches(1)
    next(batches)
    made = set(threading.enumerate()) - before
    assert made
    batches.close()
    assert not made & set(threading.enumerate())


def test_a_batch_may_be_larger_than_a_block(directories):
    batches = of_pairs(directories[0], batch_rows=40, packing_window=20)[1].train_batches(1)
    filled = [np.count_nonzero(next(batches)["source_segments"][:, 0]) for _ in range(8)]
    batches.close()
    assert min(filled) >= 20
