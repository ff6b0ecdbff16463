# tests: data/translation_input.py, data/corpus_input.py, data/input.py, data/stages.py
"""Tests TranslationInput: batches decode to the sentences of the corpus."""

import collections
import json
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.data import translation_input
from lingvo_gshard.data.held_out import split_of
from lingvo_gshard.data.sources import tsv
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.formats import moses
from lingvo_gshard.wings.services.routers.token_kinds import kinds_in
from tests.data import corpora
from tests.told import Told


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    corpora.write(directory / "train.tsv", 300)
    corpora.write(directory / "test.tsv", 20, languages=("de",))
    return directory


def params(place, **values):
    p = TranslationInput.params()
    p.corpus = tsv.TsvReader.params().set(
        train=str(place / "train.tsv"), test=str(place / "test.tsv")
    )
    p.vocabulary.set(size=290, cache_directory=str(place / "cache"))
    p.set(batch_rows=4, source_length=72, target_length=64, packing_window=100)
    return p.set(**values)


def segments_as_text(batch, data):
    for row in range(len(batch["source_ids"])):
        for segment in range(1, batch["source_segments"][row].max() + 1):
            source = batch["source_ids"][row][batch["source_segments"][row] == segment]
            target = batch["target_labels"][row][batch["target_segments"][row] == segment]
            yield (
                data.source_vocabulary.decode(source),
                data.target_vocabulary.decode(target),
            )


@pytest.mark.parametrize("joint", [True, False])
def test_batches_contain_the_corpus(place, joint):
    p = params(place)
    p.vocabulary.joint = joint
    p.vocabulary.size = corpora.SIZE if joint else 290
    data = p.instantiate()
    assert (data.source_vocabulary is data.target_vocabulary) == joint
    rows = {(row.source, row.target) for row in data.rows("train")}
    batches = data.train_batches(seed=1)
    specs = data.batch_specs(p)
    seen = set()
    for _ in range(60):
        batch = next(batches)
        assert {n: tf.TensorSpec(a.shape, a.dtype) for n, a in batch.items()} == specs
        seen.update(segments_as_text(batch, data))
    batches.close()
    assert seen == rows


def test_counts_of_the_report_add_up(place):
    data = params(place, target_length=18).instantiate()
    report = data.report
    assert report.dropped[translation_input.TOO_MANY_TOKENS] > 0
    assert report.read == 300 == report.kept + report.dropped.total()
    assert report.dropped[near_duplicates.DUPLICATE] == 300 - len(data.rows("train"))


def test_skipped_rows_are_in_the_report(tmp_path, place):
    text = (place / "train.tsv").read_text() + "broken\n"
    (tmp_path / "train.tsv").write_text(text)
    p = params(place)
    p.corpus.train = str(tmp_path / "train.tsv")
    with pytest.raises(ValueError, match=r"train.tsv:301: wrong number of columns"):
        p.instantiate().rows("train")
    p.corpus.on_bad_row = "skip"
    report = p.instantiate().report
    assert report.read == 301 == report.kept + report.dropped.total()
    assert report.dropped["wrong number of columns"] == 1
    assert "train.tsv:301" in report.examples["wrong number of columns"]


def test_resumes_with_a_new_input(place):
    one = params(place).instantiate().train_batches(seed=5)
    for _ in range(37):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    other = params(place).instantiate().train_batches(seed=5)
    other.set_state(state)
    for _ in range(50):
        expected, actual = next(one), next(other)
        assert all(np.array_equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    "change", ["seed", "temperature", "languages", "batch_rows", "segmentations"]
)
def test_rejects_a_state_of_other_data(place, change):
    state = params(place).instantiate().train_batches(seed=5).get_state()
    values = {"temperature": 2.0, "languages": ("de",), "batch_rows": 5, "segmentations": 2}
    p = params(place, **({change: values[change]} if change in values else {}))
    batches = p.instantiate().train_batches(seed=6 if change == "seed" else 5)
    with pytest.raises(ValueError, match="belongs to another stream"):
        batches.set_state(state)


def test_evaluation_batches_contain_every_row_once(place):
    data = params(place).instantiate()
    found = collections.Counter()
    for batch in data.evaluation_batches("test"):
        assert batch["source_ids"].shape == (4, 72)
        found.update(segments_as_text(batch, data))
    assert found == collections.Counter((r.source, r.target) for r in data.rows("test"))


def test_training_rows_are_split_in_several_ways(place):
    p = params(place, segmentations=3, segmentation_alpha=0.1)
    p.vocabulary.size = 400
    data = p.instantiate()
    rows = {(row.source, row.target) for row in data.rows("train")}
    ways = collections.defaultdict(set)
    batches = data.train_batches(seed=1)
    for _ in range(150):
        batch = next(batches)
        for row, segments in enumerate(batch["source_segments"]):
            for segment in range(1, segments.max() + 1):
                ids = batch["source_ids"][row][segments == segment]
                ways[data.source_vocabulary.decode(ids)].add(tuple(ids))
        assert set(segments_as_text(batch, data)) <= rows
    batches.close()
    assert set(ways) == {source for source, _ in rows}
    assert max(map(len, ways.values())) == 3
    held_out = next(data.evaluation_batches("test"))
    for ids, segments in zip(held_out["source_ids"], held_out["source_segments"], strict=True):
        first = ids[segments == 1].tolist()
        if first:
            text = data.source_vocabulary.decode(first)
            assert first == [*data.source_vocabulary.encode(text), data.source_vocabulary.eos_id]


def test_a_vocabulary_without_random_pieces_says_so(place, monkeypatch):
    data = params(place, segmentations=2).instantiate()
    monkeypatch.setattr(type(data.source_vocabulary), "can_sample", False)
    with pytest.raises(ValueError, match="input.segmentations = 2: a vocabulary of SentencePiece"):
        data.train_batches(seed=1)


def test_languages(place):
    assert params(place).instantiate().languages == ("de", "fr")
    data = params(place, languages="fr").instantiate()
    assert data.languages == ("fr",)
    assert {row.language for row in data.rows("train")} == {"fr"}
    assert data.rows("test") == []
    for split in ("train", "test"):
        with pytest.raises(ValueError, match="the corpus has no 'frr'. Did you mean 'fr'"):
            params(place, languages=("fr", "frr")).instantiate().rows(split)
    with pytest.raises(ValueError, match="Unknown split 'tests'. Did you mean 'test'"):
        data.rows("tests")


def test_saved_vocabularies_are_reused(place, tmp_path):
    data = params(place).instantiate()
    data.save_vocabularies(str(tmp_path))
    p = params(place)
    p.vocabulary.set(size=299, cache_directory="/nowhere")
    other = p.instantiate()
    other.load_vocabularies(str(tmp_path))
    assert other.source_vocabulary == data.source_vocabulary
    one, two = (next(d.train_batches(seed=1)) for d in (data, other))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_the_reader_can_be_replaced(place, tmp_path):
    rows = corpora.rows(200, languages=("de",))
    (tmp_path / "train.de").write_text("".join(row.source + "\n" for row in rows))
    (tmp_path / "train.en").write_text("".join(row.target + "\n" for row in rows))
    p = params(place)
    p.corpus = moses.MosesReader.params().set(train=str(tmp_path / "train"))
    p.vocabulary.size = 290
    data = p.instantiate()
    assert next(data.train_batches(seed=1))["source_ids"].any()
    assert len(data.rows("train")) > len(data.rows("test"))


def test_raises_if_no_row_remains(place):
    with pytest.raises(ValueError) as error:
        next(params(place, source_length=1).instantiate().train_batches(seed=1))
    assert re.fullmatch(
        r"No training row is left of 300: \d+ dropped: more tokens than a batch's row "
        r"\(.*/train.tsv:1: '.+'\)\. 300 rows have more source tokens than "
        r"input\.source_length = 1\. .* input\.source_length = \d+ keeps .+\.",
        str(error.value),
    )


def test_an_empty_file_says_so(place, tmp_path):
    (tmp_path / "empty.tsv").write_text("")
    p = params(place)
    p.corpus.train = str(tmp_path / "empty.tsv")
    with pytest.raises(ValueError, match="input.corpus.train has no rows: its files are empty"):
        p.instantiate().rows("train")


def test_a_dev_split_without_rows_says_so(place, tmp_path):
    (tmp_path / "empty.tsv").write_text("")
    p = params(place)
    p.corpus.dev = str(tmp_path / "empty.tsv")
    with pytest.raises(ValueError, match="input.corpus.dev has no rows: its files are empty"):
        p.instantiate().check_split("dev")
    (tmp_path / "empty.tsv").write_text("de\t\tYes\n")
    with pytest.raises(ValueError, match=r"No dev row is left of 1: 1 dropped: .*empty"):
        p.instantiate().check_split("dev")


def test_training_text_too_small_to_hold_rows_out_has_no_dev_split(place, tmp_path):
    (tmp_path / "same.tsv").write_text("".join(f"de\tEins {i}\tOne {i}\n" for i in range(50)))
    p = params(place)
    p.corpus.set(train=str(tmp_path / "same.tsv"), dev=(), test=())
    input_ = p.instantiate()
    assert len(input_.rows("train")) == 50
    assert input_.splits == ("train",)
    assert any(
        "held out for dev or test: too few targets differ in more than case, digits and" in n
        for n in input_.notes
    )
    for split in ("dev", "test"):
        with pytest.raises(ValueError, match="No row of input.corpus.train is held out for dev"):
            input_.check_split(split)


def test_near_copies_that_were_held_out_are_counted(place, tmp_path):
    """Templates: all rows have most of their 4-grams in common, as a user's 3,000 rows had."""
    things = [f"the {color} {what}" for color in ("red", "old", "new") for what in ("car", "dog")]
    rows = [
        f"de\t{who}, {thing}, {when}\t{who} said that {thing} is here again {when}\n"
        for who in ("Anna", "Bert", "Clara", "David", "Emma", "Franz", "Greta", "Hans")
        for thing in things
        for when in ("today", "tonight", "on Monday", "on Friday", "in winter")
    ]
    (tmp_path / "own.tsv").write_text("".join(rows))
    p = params(place)
    p.corpus.set(train=str(tmp_path / "own.tsv"), dev=(), test=(), held_out_per_mille=100)
    input_ = p.instantiate()
    _, report = input_._load("train")
    held_out = [row for row in rows if split_of(row.split("\t")[2].strip(), 100) != "train"]
    assert len(held_out) > 10 and report.read == len(rows)
    assert sum(report.dropped.values()) == len(held_out) == len(rows) - report.kept
    (note,) = (n for n in input_.notes if "held out for" in n)
    assert note == (
        f"No row of input.corpus.train is held out for dev or test: {len(held_out)} were, and are "
        "dropped as near copies. Files of their own would help."
    )


def test_a_missing_dev_file_stops_before_train_is_read(place):
    p = params(place)
    p.corpus.set(dev=str(place / "de.tsv"), on_bad_row="skip")
    with pytest.raises(ValueError, match=r"input.corpus.dev: .*/de.tsv: no such file"):
        p.instantiate().rows("train")


def test_the_stages_are_told(place, tmp_path):
    p = params(place)
    p.vocabulary.cache_directory = str(tmp_path)
    data = p.instantiate()
    data.progress = told = Told()
    assert data.report.kept
    begun = zip(told.stages, told.totals, strict=True)
    assert [(stage.split(" of ")[0], unit) for stage, (unit, _) in begun] == [
        ("Reading train", "rows"),
        ("Cleaning train", "rows"),
        ("Training a vocabulary", ""),
        ("Tokenizing sources", "sentences"),
        ("Tokenizing targets", "sentences"),
    ]
    assert told.shares and all(0 <= share <= 1 for share in told.shares)


def test_tokens_have_the_language_of_their_sentence_also_after_resuming(place):
    data = params(place).instantiate()
    languages = {row.source: row.language for row in data.rows("train")}
    batches = data.train_batches(seed=3)
    next(batches)
    resumed = params(place).instantiate().train_batches(seed=3)
    resumed.set_state(json.loads(json.dumps(batches.get_state())))
    seen = set()
    for stream in (batches, resumed):
        batch = next(stream)
        kinds = kinds_in(data, batch)
        assert kinds.languages == ("de", "fr")
        numbers = {name: array // len(kinds.classes) for name, array in kinds.arrays.items()}
        for row, segments in enumerate(batch["source_segments"]):
            for segment in range(1, segments.max() + 1):
                ids = batch["source_ids"][row][segments == segment]
                language = languages[data.source_vocabulary.decode(ids)]
                source = numbers["source_kinds"][row][segments == segment]
                is_target = batch["target_segments"][row] == segment
                target = numbers["target_kinds"][row][is_target]
                assert {kinds.languages[n] for n in (*source, *target)} == {language}
                seen.add(language)
        stream.close()
    assert seen == {"de", "fr"}


def test_classes_follow_from_the_pieces(place):
    data = params(place).instantiate()
    batches = data.train_batches(seed=3)
    batch = next(batches)
    kinds = kinds_in(data, batch)
    real = batch["source_segments"] > 0
    named = [kinds.classes[n] for n in (kinds.arrays["source_kinds"] % len(kinds.classes))[real]]
    for name, index in zip(named, batch["source_ids"][real], strict=True):
        piece = data.source_vocabulary.piece(index)
        expected = "first piece" if piece.startswith("▁") else "continuation"
        assert name == ("end of sentence" if index == 2 else expected)
    first = kinds.arrays["target_kinds"][batch["target_positions"] == 0] % len(kinds.classes)
    starts = batch["target_inputs"][batch["target_positions"] == 0] == 1
    assert {kinds.classes[n] for n in first[starts]} == {"start of text"}
    batches.close()
