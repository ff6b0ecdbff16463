"""Tests readers of documents."""

import gzip
import lzma

import pytest

from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.text import IN_HELD_OUT, EmbeddedEnglish, TextReader
from lingvo_gshard.wings.preparation.cleaning import leaks

TEXT = "one\ntwo\n\n \nthree\r\n\nfour\nfive\n"


def read(paths, **values):
    reader = TextReader.params().set(train=paths, dev=paths, **values).instantiate()
    return reader.rows("train"), reader


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("paragraph", [("one\ntwo", 1), ("three", 5), ("four\nfive", 7)]),
        ("line", [("one", 1), ("two", 2), ("three", 5), ("four", 7), ("five", 8)]),
        ("file", [("one\ntwo\n\n \nthree\n\nfour\nfive", 1)]),
    ],
)
def test_documents_are_split_by_kind(document, expected, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, newline="")
    rows, _ = read(f"{tmp_path}/a.txt", document=document)
    assert [(row.target, row.line) for row in rows] == expected
    assert {(row.language, row.source, row.file) for row in rows} == {("", "", f"{tmp_path}/a.txt")}


def test_compressed_files_and_globs(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"smaller"))
    rows, _ = read((f"{tmp_path}/*.txt*",))
    assert [row.target for row in rows] == ["plain", "packed", "smaller"]


def test_invalid_text_raises_or_is_skipped_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\xff\nbetter\n")
    with pytest.raises(ValueError, match=r"a\.txt:2: not UTF-8: byte 0 of the line is 0xff"):
        read(str(path))
    rows, reader = read(str(path), on_bad_row="skip")
    assert [row.target for row in rows] == ["good\nbetter"]
    assert reader.left_out == {"not UTF-8": 1}
    with pytest.raises(ValueError, match="none.txt: no such file"):
        read(f"{tmp_path}/none.txt")


def test_an_unknown_kind_of_document_is_refused():
    with pytest.raises(ValueError, match="document is 'lines'; expected .*'line'"):
        read("x", document="lines")


def test_documents_are_held_out_if_no_evaluation_files_are_given(tmp_path):
    words = "red green blue small large old new fast slow warm".split()
    texts = [f"{a} {b} {c}\n\n" for a in words for b in words for c in words]
    (tmp_path / "a.txt").write_text("".join(texts))
    reader = TextReader.params().set(train=f"{tmp_path}/a.txt", held_out_per_mille=50)
    reader = reader.instantiate()
    found = {split: {row.target for row in reader.rows(split)} for split in readers.SPLITS}
    assert sum(map(len, found.values())) == 1000
    assert 20 < len(found["dev"]) < 90 and 20 < len(found["test"]) < 90
    assert leaks.TARGET_OVERLAPS not in reader.left_out


@pytest.fixture(scope="module")
def english():
    """Returns the English side of the corpus by split, and the reader after reading train."""
    reader = EmbeddedEnglish.params().instantiate()
    return {split: reader.rows(split) for split in ("dev", "test", "train")}, reader


def test_no_english_of_dev_and_test_is_in_train(english):
    rows, reader = english
    folded = {s: {fold(row.target) for row in rows[s]} for s in rows}
    assert not folded["train"] & (folded["dev"] | folded["test"])
    texts = {split: {row.target for row in found} for split, found in rows.items()}
    assert not texts["dev"] & texts["test"]
    assert reader.left_out == {IN_HELD_OUT: 1} and len(reader.examples) == 1


def test_each_message_is_one_document(english):
    rows, _ = english
    assert {split: len(found) for split, found in rows.items()} == {
        "train": 27_364,
        "dev": 258,
        "test": 464,
    }
    for found in rows.values():
        assert len({row.target for row in found}) == len(found)
        assert {(row.language, row.source) for row in found} == {("en", "")}
