# tests: wings/preparation/prepared/manifest.py, wings/preparation/prepared/table.py
"""Tests damaged, missing and foreign files of prepared data: sentences that name the file."""

import os
import shutil

import numpy as np
import pytest

from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.table import PreparedTable
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from tests.preparation.prepared import corpora


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    corpora.prepare(path, {("de", "web"): (4_000, 5), ("fr", "web"): (40, 5)})
    return path


@pytest.fixture
def directory(made, tmp_path):
    return shutil.copytree(made, tmp_path / "prepared")


def shard(directory, number=1):
    """Returns the path of a shard of German training rows, and its entry."""
    entry = manifest.read(directory).splits["train"][number]
    return directory / entry.file, entry


def make(directory, **values):
    p = PreparedTranslationInput.params().set(
        directory=str(directory),
        batch_rows=8,
        source_length=48,
        target_length=28,
        packing_window=500,
        **values,
    )
    return p.instantiate()


def change(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def sources(table):
    """Returns the sources of all rows of a table, in their order; () for rows without tokens."""
    tokens = table.read(np.arange(len(table))).sources
    return [tuple(part.tolist()) for part in np.split(tokens.ids, tokens.offsets[1:-1])]


def read_all(input_, count=250):
    batches = input_.train_batches(1)
    try:
        return [next(batches) for _ in range(count)]
    finally:
        batches.close()


def test_rows_are_read_in_any_order(directory):
    table = PreparedTable(directory, manifest.read(directory), "train")
    everything = sources(table)
    assert len(set(everything)) == 4_040 and all(everything)
    rows = np.random.default_rng(0).permutation(4_040)[:500]
    records = table.read(rows)
    tokens = records.sources.take(records.places_of(rows))
    np.testing.assert_array_equal(tokens.lengths, table.lengths_of(rows)[:, 0])
    parts = np.split(tokens.ids, tokens.offsets[1:-1])
    assert [tuple(part.tolist()) for part in parts] == [everything[row] for row in rows]


def test_a_changed_byte_is_an_error_that_names_the_shard(directory):
    path, entry = shard(directory)
    change(path, 30_000)
    with pytest.raises(ValueError) as error:
        read_all(make(directory))
    text = str(error.value)
    assert text.startswith(f"{path}: row ") and "hash mismatch" in text
    assert text.endswith('input.on_damage = "skip" leaves out its rows')


def test_rows_around_a_changed_byte_are_skipped(directory, caplog):
    path, entry = shard(directory)
    intact = sources(PreparedTable(directory, manifest.read(directory), "train"))
    change(path, 30_000)
    table = PreparedTable(directory, manifest.read(directory), "train", "skip")
    found = sources(table)
    lost = [row for row, source in enumerate(found) if not source]
    # The rows of one block of 64 KiB, all in the second shard.
    assert 0 < len(lost) < 1_500 and lost == list(range(lost[0], lost[-1] + 1))
    assert 2_000 <= lost[0] and lost[-1] < 4_000
    assert all(one == two for one, two in zip(found, intact, strict=True) if one)
    assert table.damaged == {entry.file: len(lost)}
    assert f"{path}: row" in caplog.text


def test_training_leaves_skipped_rows_out(directory):
    path, entry = shard(directory)
    intact = read_all(make(directory))
    change(path, 30_000)
    damaged = read_all(make(directory, on_damage="skip"))
    rows = [np.unique(np.concatenate([b.examples.ravel() for b in x])) for x in (intact, damaged)]
    assert 0 < len(rows[0]) - len(rows[1]) < 1_500 and set(rows[1]) < set(rows[0])
    for one, two in zip(intact, damaged, strict=True):
        # The other rows stay where they were.
        assert one.digest == two.digest
        kept = np.isin(one.examples, rows[1][rows[1] >= 0]).sum()
        assert kept == (two.examples >= 0).sum()
        assert (two["source_ids"] > 0).sum() == (two["source_segments"] > 0).sum()


@pytest.mark.parametrize("problem", ["missing", "truncated", "empty"])
def test_a_shard_of_another_size_is_found_before_training(directory, problem):
    path, entry = shard(directory)
    words = "there is no such file"
    if problem == "missing":
        path.unlink()
    else:
        content = path.read_bytes()[: 70_000 if problem == "truncated" else 0]
        path.write_bytes(content)
        words = f"has {len(content):,} bytes"
    with pytest.raises(ValueError) as error:
        make(directory).check_split("train")
    assert str(error.value).startswith(f"{path}: {words}; the manifest says {entry.bytes:,} bytes.")
    skipping = make(directory, on_damage="skip")
    skipping.check_split("train")
    read = {row for batch in read_all(skipping) for row in batch.examples.ravel().tolist()}
    assert read and not read & set(range(2_000, 4_000))


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "there is no such file, but train/de/web-00001-of-00002.array_record needs it"),
        (b"", "the lengths cannot be read"),
        (b"no array", "the lengths cannot be read"),
    ],
)
def test_damaged_lengths_are_an_error(directory, content, words):
    path = directory / shard(directory)[1].lengths
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        make(directory).check_split("train")
    assert str(error.value).startswith(f"{path}: {words}")


def test_lengths_of_other_rows_are_an_error(directory):
    """Records whose sizes differ from the plan would end up in the wrong places."""
    path, entry = shard(directory)
    lengths = directory / entry.lengths
    table = np.load(lengths)
    np.save(lengths, table[:-1])
    with pytest.raises(ValueError, match=r"has uint16\[1999, 2\]; the manifest says 2,000 rows"):
        make(directory).check_split("train")
    np.save(lengths, np.roll(table, 1, axis=0))
    with pytest.raises(ValueError, match=r"row .* source tokens, but its lengths are") as error:
        read_all(make(directory))
    assert str(error.value).startswith(f"{path}: row ")


def test_another_vocabulary_is_an_error(directory):
    change(directory / "joint.model", -1)
    with pytest.raises(ValueError, match="is not the one that the manifest describes") as error:
        make(directory).vocabulary_sizes()
    assert str(error.value).startswith(f"{directory / 'joint.model'}: ")


def test_a_missing_split_and_a_wrong_flag_are_named(directory):
    with pytest.raises(ValueError, match="no split 'tes'"):
        make(directory).check_split("tes")
    with pytest.raises(ValueError, match="on_damage is 'skp'; expected 'error' or 'skip'"):
        make(directory, on_damage="skp")


def test_rows_longer_than_every_batch_are_named(directory):
    p = make(directory).p.copy().set(source_length=2, target_length=2)
    with pytest.raises(ValueError, match="none of the 4,040 rows of 'train' fits a batch's row"):
        p.instantiate().check_split("train")
    assert any("input.source_length" in note for note in p.instantiate().notes)


def test_lengths_that_are_cut_off_while_training_reads_them(directory):
    """Reading a mapped page behind the end of its file would end the process by SIGBUS."""
    batches = make(directory).train_batches(1)
    next(batches)
    for entry in manifest.read(directory).splits["train"]:
        path = directory / entry.lengths
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"lengths\.npy was cut off to [\d,]+ bytes while it was"):
        for _ in range(10_000):
            next(batches)
    batches.close()
