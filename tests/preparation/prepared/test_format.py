# tests: wings/preparation/prepared/manifest.py, wings/preparation/prepared/shard_writer.py
"""Tests the files of prepared data: records, shards, lengths and the manifest."""

import hashlib
import struct

import hypothesis
import msgspec
import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import strategies as st

from lingvo_gshard.wings.preparation.prepared import manifest, shard_writer
from tests.preparation.prepared import records

_IDS = st.lists(st.integers(0, 0xFFFF), max_size=20)
_ROWS = [([4, 5, 2], [6, 2]), ([], [9, 8, 7, 2]), ([70, 2], [2])]


@hypothesis.given(st.lists(st.tuples(_IDS, _IDS), max_size=10), st.sampled_from([2, 4]))
def test_records_hold_the_ids(rows, width):
    encoded = [records.encode(source, target, width) for source, target in rows]
    for side, tokens in enumerate(manifest.decode(encoded, width)):
        assert tokens.ids.dtype == np.int32
        found = np.split(tokens.ids, tokens.offsets[1:-1]) if rows else []
        assert [part.tolist() for part in found] == [row[side] for row in rows]


def test_ids_need_two_bytes_up_to_65536_ids():
    assert [manifest.id_bytes(n) for n in (4, 1 << 16, (1 << 16) + 1)] == [2, 2, 4]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "record 1 has 0 bytes"),
        (b"\1\0\0", "record 1 has 3 bytes; a positive multiple of 2"),
        (b"\2\0\7\0", "record 1 has 1 tokens, and begins with a number of source tokens of 2"),
    ],
)
def test_bytes_that_are_no_record_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        manifest.decode([records.encode([4], [5]), content], 2)


def _write(directory, rows=_ROWS, **names):
    names = {"split": "train", "language": "de", "source": "web"} | names
    with shard_writer.ShardWriter(directory, **names) as writer:
        for source, target in rows:
            records.write(writer, source, target)
    return writer.close()


def test_a_shard_is_an_array_record_file_with_its_lengths(tmp_path):
    shard = _write(tmp_path, number=1, count=4)
    assert shard.file == "train/de/web-00001-of-00004.array_record"
    reader = array_record_module.ArrayRecordReader(str(tmp_path / shard.file))
    assert reader.read_all() == [records.encode(*row) for row in _ROWS]
    lengths = np.load(tmp_path / shard.lengths, mmap_mode="r")
    assert lengths.dtype == np.uint16 and lengths.tolist() == [[3, 2], [0, 4], [2, 1]]
    assert (shard.rows, shard.source_tokens, shard.target_tokens) == (3, 5, 7)
    content = (tmp_path / shard.file).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.bytes, shard.sha256)
    assert {path.name for path in (tmp_path / "train/de").iterdir()} == {
        "web-00001-of-00004.array_record",
        "web-00001-of-00004.lengths.npy",
    }


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows = [(list(range(4, 4 + i % 50)), [i % 900, 2]) for i in range(5_000)]
    first, second = (_write(tmp_path / name, rows) for name in "ab")
    assert first == second
    assert first != _write(tmp_path / "c", rows[::-1])


def test_lengths_beyond_two_bytes_are_kept(tmp_path):
    shard = _write(tmp_path, [([], [5] * 70_000)])
    lengths = np.load(tmp_path / shard.lengths)
    assert lengths.dtype == np.uint32 and lengths.tolist() == [[0, 70_000]]


def test_a_shard_without_rows_is_written(tmp_path):
    shard = _write(tmp_path, [])
    assert shard.rows == 0 and np.load(tmp_path / shard.lengths).shape == (0, 2)
    assert not records.differing(manifest.Manifest(splits={"train": [shard]}), tmp_path)


def test_nothing_is_left_of_a_shard_that_failed(tmp_path):
    with pytest.raises(struct.error):
        _write(tmp_path, [([], [1 << 20])])
    assert not list((tmp_path / "train/de").iterdir())


@pytest.mark.parametrize("name", ["../de", "", ".de", "a/b", "é"])
def test_names_that_are_no_files_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="language .* is no name of a file"):
        _write(tmp_path, language=name)


def _made(directory):
    shard = _write(directory)
    (directory / "joint.model").write_bytes(b"pieces")
    vocabulary = manifest.VocabularyFile(
        side="joint",
        kind="sentencepiece",
        files=["joint.model"],
        size=80,
        sha256=hashlib.sha256(b"pieces").hexdigest(),
    )
    made = manifest.Manifest(
        splits={"train": [shard]},
        settings={"seed": 1, "cleaning": {"max_characters": 500}},
        languages={"de": manifest.LanguageCounts(read=5, kept={"train": 3}, rejected={"short": 2})},
        rejections=[manifest.Rejection(reason="short", rows=2, examples=["a.tsv:3: 'x'"])],
        vocabularies=[vocabulary],
    )
    manifest.write(made, directory)
    return made


def test_a_manifest_is_read_as_written(tmp_path):
    made = _made(tmp_path)
    assert manifest.read(tmp_path) == made
    assert made.rows("train") == 3 and made.rows("dev") == 0
    before = (tmp_path / manifest.FILE).read_bytes()
    manifest.write(manifest.read(tmp_path), tmp_path)
    assert (tmp_path / manifest.FILE).read_bytes() == before
    assert not records.differing(made, tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no such file. A directory that gshard-prepare has written"),
        (b'{"format": 7}', "has format 7, and this program reads format 1"),
        (b'{"format": 1, "splits": 3}', "the manifest is damaged: Expected `object`"),
        (b'{"format"', "the manifest is damaged"),
        (b"\xff\0", "the manifest is damaged"),
    ],
)
def test_other_manifests_are_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / manifest.FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        manifest.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / manifest.FILE}: ")


def test_fields_that_a_later_format_adds_do_not_matter(tmp_path):
    made = _made(tmp_path)
    raw = msgspec.json.decode((tmp_path / manifest.FILE).read_bytes())
    (tmp_path / manifest.FILE).write_bytes(msgspec.json.encode(raw | {"more": 1}))
    assert manifest.read(tmp_path) == made
