# tests: wings/preparation/pipeline.py, wings/preparation/inspector.py, wings/preparation/job.py
# tests: wings/preparation/pool.py, wings/preparation/preparation.py, wings/preparation/read_rows.py
# tests: wings/preparation/row_files.py, wings/preparation/shards.py
# tests: wings/preparation/train_vocabulary.py
"""Tests that preparation gives the rows that were read, and the same bytes every time."""

import pathlib

import pytest

from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation import sources as survey
from tests.preparation import raw
from tests.preparation.prepared import records


def _expected(rows, per_mille):
    """Returns (split, language, source, target) of rows, computed from all of them at once."""
    divided = held_out.divide([Row(*row) for row in dict.fromkeys(rows)], per_mille)
    return sorted((split, *row[:3]) for split, rows in divided.rows.items() for row in rows)


def test_all_rows_come_out_once(tmp_path):
    rows = raw.rows(300)
    path = raw.write_tsv(tmp_path / "pairs.tsv", [*rows, *rows[:20], ("de", "", "nothing")])
    directory, prepared = raw.run(tmp_path, [path], held_out_per_mille=100)
    assert raw.texts(directory) == _expected(rows, 100)
    assert records.differing(prepared, directory) == []
    counts = {one.reason: (one.rows, one.examples) for one in prepared.rejections}
    assert counts["a duplicate"][0] == 20
    assert counts["a duplicate"][1][0].startswith(f"{path}:301: ")
    assert counts["a side is empty"] == (1, [f"{path}:321: 'nothing'"])
    german = prepared.languages["de"]
    assert german.read == 161 and sum(german.kept.values()) == 150
    assert german.rejected == {"a duplicate": 10, "a side is empty": 1}
    assert not (directory / ".work").exists()


def test_parts_buckets_and_shards_change_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "PART_LINES", 64)
    monkeypatch.setattr("lingvo_gshard.wings.preparation.read_rows._CHUNK_CHARACTERS", 900)
    rows = raw.rows(300)
    path = raw.write_tsv(tmp_path / "pairs.tsv", rows * 2)
    directory, prepared = raw.run(
        tmp_path, [path], held_out_per_mille=100, bucket_bytes=2000, shard_rows=50
    )
    assert raw.texts(directory) == _expected(rows, 100)
    shards = [s for s in prepared.splits["train"] if s.language == "de"]
    assert len(shards) == 3 and max(shard.rows for shard in shards) <= 50
    assert [one.rows for one in prepared.rejections] == [300]


def test_the_seed_changes_the_order_and_nothing_else(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(200))
    one, _ = raw.run(tmp_path, [path], output="one")
    again, _ = raw.run(tmp_path, [path], output="again")
    other, _ = raw.run(tmp_path, [path], output="other", seed=1)
    assert raw.digests(one) == raw.digests(again)
    name = "train/de/pairs-00000-of-00001.array_record"
    assert raw.digests(one)[name] != raw.digests(other)[name]
    assert raw.texts(one) == raw.texts(other)


@pytest.mark.slow
def test_the_number_of_workers_changes_no_byte(tmp_path, monkeypatch):
    names = []
    for part in range(5):
        rows = raw.rows(400, seed=part) + raw.rows(50)
        names.append(raw.write_tsv(tmp_path / f"part{part}.tsv", rows))
    found = [
        raw.digests(
            raw.run(tmp_path, names, workers=workers, output=f"out{workers}", bucket_bytes=20_000)[
                0
            ]
        )
        for workers in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 10


def test_prepared_data_is_left_as_it_is(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(100))
    directory, _ = raw.run(tmp_path, [path])
    changed = (directory / "manifest.json").stat().st_mtime_ns
    raw.run(tmp_path, [path])
    assert (directory / "manifest.json").stat().st_mtime_ns == changed
    with pytest.raises(ValueError, match=r"out holds .* seed was 0, and is now 3"):
        raw.run(tmp_path, [path], seed=3)
    pathlib.Path(path).write_text("de\tx\ty\n")
    with pytest.raises(ValueError, match=r"out holds .* file .*pairs.tsv was "):
        raw.run(tmp_path, [path])


def test_data_that_an_earlier_version_prepared_is_left_as_it_is(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(100))
    directory, _ = raw.run(tmp_path, [path])
    manifest = directory / "manifest.json"
    old = manifest.read_text().replace("lingvo_gshard.wings.preparation.", "lingvo_gshard.data.")
    assert "lingvo_gshard.data.cleaning.cleaner.Cleaner" in old
    assert "lingvo_gshard.data.vocabularies.vocabulary_trainer.VocabularyTrainer" in old
    manifest.write_text(old)
    raw.run(tmp_path, [path])
    assert manifest.read_text() == old


def test_sources_keep_their_splits(tmp_path):
    rows = raw.rows(60)
    train = raw.write_tsv(tmp_path / "train.tsv", rows[:50])
    # A test set is kept as it is, repeated rows included.
    test = raw.write_tsv(tmp_path / "test.tsv", rows[50:] + rows[50:52])
    sources = [f"{train},split=train,name=news", f"{test},split=test,name=news"]
    directory, prepared = raw.run(tmp_path, sources)
    expected = [("train", *row) for row in rows[:50]]
    expected += [("test", *row) for row in rows[50:] + rows[50:52]]
    assert raw.texts(directory) == sorted(expected)
    assert [source.name for source in prepared.sources] == ["news"]
    assert {shard.source for shards in prepared.splits.values() for shard in shards} == {"news"}


def test_rows_held_out_do_not_leak(tmp_path):
    # Each sentence with a number is told apart from others by words, and not by the number.
    rows = raw.rows(400)
    near = [(language, f"{source} noch", f"{target} 7") for language, source, target in rows[:40]]
    copied = [
        (language, source, f"{target} tree again") for language, source, target in rows[40:80]
    ]
    path = raw.write_tsv(tmp_path / "pairs.tsv", [*rows, *near, *copied])
    directory, prepared = raw.run(tmp_path, [path], held_out_per_mille=150)
    made = [Row(*row, path, line) for line, row in enumerate([*rows, *near, *copied], start=1)]
    expected = held_out.divide(made, 150)
    assert raw.texts(directory) == sorted(
        (split, *row[:3]) for split, rows in expected.rows.items() for row in rows
    )
    counts = {one.reason: one.rows for one in prepared.rejections}
    assert counts == expected.dropped["dev"] + expected.dropped["test"]
    assert len(counts) == 2
