# tests: wings/preparation/prepared/base_input.py
# tests: wings/preparation/prepared/language_model_input.py, wings/preparation/prepared/table.py
# tests: wings/preparation/prepared/translation_input.py, data/batching/stream.py
"""Tests the training batches of prepared data: every token, any number of processes, resumption."""

import collections
import json
import re

import numpy as np
import pytest

from lingvo_gshard.data.batching import mixture_plan, packing
from lingvo_gshard.wings.preparation.prepared import base_input, manifest
from lingvo_gshard.wings.preparation.prepared.language_model_input import PreparedLanguageModelInput
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.wings.services.routers.token_kinds import kinds_in
from tests.preparation.prepared import corpora

SHAPE = {"batch_rows": 8, "source_length": 48, "target_length": 28}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    corpora.prepare(path)
    return path


@pytest.fixture(autouse=True)
def short_chapters(monkeypatch):
    monkeypatch.setattr(mixture_plan, "BLOCKS_OF_CHAPTER", 3)


def make(directory, own_rows=None, **values):
    p = PreparedTranslationInput.params().set(directory=str(directory), packing_window=200)
    mixing = {name: values.pop(name) for name in ("temperature",) if name in values}
    p.mixing.set(**mixing)
    made = p.set(**{**SHAPE, **values}).instantiate()
    made.own_rows = own_rows
    return made


def take(batches, count):
    return [next(batches) for _ in range(count)]


def texts(input_, batch):
    """Returns the text of each segment of a batch: (row of the batch, source, target)."""
    found = []
    for row in range(len(batch["source_ids"])):
        for segment in range(1, batch["source_segments"][row].max() + 1):
            sides = []
            for side, vocabulary in (
                ("source_ids", input_.source_vocabulary),
                ("target_labels", input_.target_vocabulary),
            ):
                is_here = batch[f"{side.split('_')[0]}_segments"][row] == segment
                sides.append(vocabulary.decode(batch[side][row][is_here].tolist()))
            found.append((row, *sides))
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_batches_hold_whole_rows_and_each_row_once_an_epoch(directory):
    """At temperature 1, as many rows as there are give each row once, whatever its language."""
    input_ = make(directory)
    expected = {(row.source, row.target) for row in input_.rows("train")}
    assert len(expected) == 1050
    batches, counts = input_.train_batches(1), collections.Counter()
    while sum(counts.values()) < 4 * 1050:
        batch = next(batches)
        # A shorter chapter is flushed every 600 rows.
        assert batch["source_ids"].shape == (8, 48) and batch["target_labels"].shape == (8, 28)
        counts.update((source, target) for _, source, target in texts(input_, batch))
    batches.close()
    assert set(counts) == expected
    # Batches are shuffled within blocks, so some rows of later blocks are there and others not yet.
    assert max(counts.values()) - min(counts.values()) <= 2


def test_positions_and_inputs_are_those_of_a_packed_batch(directory):
    batches = make(directory).train_batches(1)
    batch = take(batches, 5)[-1]
    batches.close()
    for side in ("source", "target"):
        segments, positions = batch[f"{side}_segments"], batch[f"{side}_positions"]
        for row, place in zip(*np.nonzero(segments), strict=True):
            begins = place == 0 or segments[row, place - 1] != segments[row, place]
            assert positions[row, place] == (0 if begins else positions[row, place - 1] + 1)
            if side == "target":
                before = packing.BOS_ID if begins else batch["target_labels"][row, place - 1]
                assert batch["target_inputs"][row, place] == before


def test_the_order_depends_on_the_seed_and_not_on_threads(directory):
    streams = [
        make(directory, prefetch_batches=prefetched).train_batches(seed)
        for seed, prefetched in ((1, 4), (1, 0), (2, 4))
    ]
    first, second, other = (take(stream, 60) for stream in streams)
    for stream in streams:
        stream.close()
    for one, two in zip(first, second, strict=True):
        same(one, two)
        np.testing.assert_array_equal(one.examples, two.examples)
        assert one.digest == two.digest
    assert [x.digest for x in first] != [x.digest for x in other]


def _own(index, count):
    """Returns the rows of one of several processes."""
    return lambda specs: np.arange(specs["source_ids"].shape[0]) * count // 8 == index


@pytest.mark.parametrize("before, after", [(1, 2), (2, 4), (4, 1)])
def test_a_run_goes_on_with_another_number_of_processes(directory, before, after):
    """Together, the processes have every row of an undisturbed run, in its place."""
    alone = make(directory).train_batches(1)
    expected = take(alone, 70)
    alone.close()
    state, found = None, []
    for count, number in ((before, 33), (after, 37)):
        streams = [make(directory, _own(i, count)).train_batches(1) for i in range(count)]
        parts = []
        for stream in streams:
            if state is not None:
                stream.set_state(json.loads(json.dumps(state)))
            parts.append(take(stream, number))
        states = [stream.get_state() for stream in streams]
        for stream in streams:
            stream.close()
        assert states == [states[0]] * count
        state = states[0]
        for batches in zip(*parts, strict=True):
            own = np.stack(
                [_own(i, count)({"source_ids": batches[0]["source_ids"]}) for i in range(count)]
            )
            assert (own.sum(axis=0) == 1).all()
            found.append(
                {
                    n: sum(b[n] * o[:, None] for b, o in zip(batches, own, strict=True))
                    for n in batches[0]
                }
            )
            for batch, rows in zip(batches, own, strict=True):
                # Others' tokens were not read, unless a row is repeated in the block.
                others = np.count_nonzero(batch["source_ids"][~rows])
                assert others <= 0.5 * np.count_nonzero(batch["source_segments"][~rows])
                np.testing.assert_array_equal(
                    batch["source_segments"], batches[0]["source_segments"]
                )
                assert batch.digest == batches[0].digest
                same(batch.whole(), expected[len(found) - 1])
    assert len(json.dumps(state)) < 80
    for one, two in zip(found, expected, strict=True):
        same(one, two)


@pytest.mark.parametrize("taken", [0, 1, 7, 31, 64])
def test_a_run_resumes_at_every_batch(directory, taken):
    first = make(directory, temperature=3.0).train_batches(5)
    take(first, taken)
    state = first.get_state()
    expected = take(first, 20)
    # Also back in the same iterator, as a roll back does.
    first.set_state(state)
    again = take(first, 20)
    first.close()
    second = make(directory, temperature=3.0, prefetch_batches=0).train_batches(5)
    second.set_state(state)
    resumed = take(second, 20)
    assert second.get_state() != state
    second.close()
    for one, two, three in zip(expected, again, resumed, strict=True):
        same(one, two)
        same(one, three)


def test_a_position_of_another_stream_is_refused(directory):
    first = make(directory).train_batches(1)
    state = first.get_state()
    first.close()
    for values in ({"temperature": 2.0}, {"target_length": 30}, {"packing_window": 100}):
        other = make(directory, **values).train_batches(1)
        with pytest.raises(ValueError, match="belongs to another stream"):
            other.set_state(state)
        other.close()


def test_pairs_go_to_the_shortest_bucket_that_holds_them(directory):
    input_ = make(directory, short_buckets=((16, 12, 8),))
    specs = input_.declared_batches(input_.p)
    assert [spec["source_ids"].shape for spec in specs] == [(16, 12), (8, 48)]
    batches, counts = input_.train_batches(1), collections.Counter()
    for batch in take(batches, 200):
        width = batch["source_ids"].shape[1]
        counts[batch["source_ids"].shape] += 1
        for _, source, target in texts(input_, batch):
            lengths = [len(input_.source_vocabulary.encode(text)) + 1 for text in (source, target)]
            assert (lengths[0] <= 12 and lengths[1] <= 8) == (width == 12)
    batches.close()
    assert set(counts) == {(16, 12), (8, 48)}


@pytest.mark.parametrize(
    "buckets, message",
    [
        (((8, 60, 8),), "rows of 60, 8 do not fit into those of 48, 28"),
        (((8, 12),), "a tuple of triples"),
        ((("a", 1, 2),), "a tuple of triples"),
        (((8, 48, 28),), "do not fit"),
    ],
)
def test_wrong_buckets_are_refused(directory, buckets, message):
    with pytest.raises(ValueError, match=message):
        make(directory, short_buckets=buckets)


def test_evaluation_has_each_row_once(directory):
    input_ = make(directory)
    found = [pair for batch in input_.evaluation_batches("dev") for pair in texts(input_, batch)]
    assert sorted(pair[1:] for pair in found) == sorted(
        (row.source, row.target) for row in input_.rows("dev")
    )
    assert len(found) == 13


def test_token_kinds_have_the_language_of_each_row(directory):
    input_ = make(directory)
    batches = input_.train_batches(1)
    batch = next(batches)
    batches.close()
    kinds = kinds_in(input_, batch)
    assert kinds.languages == ("de", "fr")
    language = {row.source: row.language for row in input_.rows("train")}
    of_token = kinds.arrays["source_kinds"] // len(kinds.classes)
    for row, source, _ in texts(input_, batch):
        ids = input_.source_vocabulary.encode(source)
        begin = next(
            i for i in range(48) if batch["source_ids"][row, i : i + len(ids)].tolist() == ids
        )
        assert kinds.languages[of_token[row, begin]] == language[source]


def test_epochs_are_counted_by_language(directory):
    input_ = make(directory, temperature=5.0)
    assert input_.usage() == []
    batches = input_.train_batches(1)
    taken = np.concatenate([batch.examples.ravel() for batch in take(batches, 150)])
    read = {use.language: use for use in input_.usage()}
    languages = input_.table("train").groups
    for language, use in read.items():
        own = [group for group in languages if group.language == language]
        assert use.read == sum(((taken >= g.begin) & (taken < g.begin + g.rows)).sum() for g in own)
    assert read["fr"].rows == 150 and read["fr"].epochs > read["de"].epochs
    notes = input_.usage_notes()
    batches.close()
    assert notes[0].startswith("rows read: ") and "fr" in notes[1]
    assert re.fullmatch(r"repeated: [\d,]+ rows; languages: [12]", notes[2])


def test_windows_of_documents_have_the_token_before(tmp_path):
    sizes = {("en", "books"): (60, 5)}
    corpora.prepare(tmp_path, sizes, content=manifest.TEXT, longest=60)
    p = PreparedLanguageModelInput.params().set(directory=str(tmp_path), batch_rows=4, length=32)
    input_ = p.set(packing_window=20).instantiate()
    documents = {
        number: tuple([*input_.vocabulary.encode(row.target), packing.EOS_ID])
        for number, row in enumerate(input_.rows("train"))
    }
    batches, parts = input_.train_batches(1), collections.defaultdict(list)
    found = 0
    while found < 3 * 60:
        batch = next(batches)
        for row in range(4):
            for segment in range(1, batch["target_segments"][row].max() + 1):
                here = batch["target_segments"][row] == segment
                labels = batch["target_labels"][row][here].tolist()
                document = documents[batch.examples[row, segment]]
                begins = [
                    i for i in range(0, len(document), 32) if list(document[i : i + 32]) == labels
                ]
                assert begins
                before = packing.BOS_ID if begins[0] == 0 else document[begins[0] - 1]
                assert batch["target_inputs"][row][here].tolist() == [before, *labels[:-1]]
                parts[batch.examples[row, segment]].append(begins[0])
                found += not begins[0]
    batches.close()
    assert len(parts) == 60
    assert input_.count_tokens("train") == sum(map(len, documents.values()))
    assert input_.text_size("dev").documents == 5


def test_a_directory_for_other_inputs_is_refused(directory, tmp_path):
    p = PreparedLanguageModelInput.params().set(directory=str(directory))
    with pytest.raises(ValueError, match="of the kind 'pairs'; PreparedLanguageModelInput reads"):
        p.instantiate().check_split("train")
    with pytest.raises(ValueError, match="input.directory is empty"):
        PreparedTranslationInput.params().instantiate().check_split("train")
    assert base_input.PreparedInput.content == manifest.PAIRS
