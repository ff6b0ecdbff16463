"""Tests TsvReader and EmbeddedCorpus, with errors and counts of invalid rows."""

import bz2
import collections
import gzip
import io
import lzma
import os
import re
import zipfile

import pytest

from lingvo_gshard.data.sources import tsv


def reader(**values):
    return tsv.TsvReader.params().set(**values).instantiate()


def write(path, content, opener=open):
    with opener(path, "wb") as file:
        file.write(content)
    return str(path)


def zipped(content):
    """Returns an archive whose first line is UTF-8 with NUL bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a\n", (1980, 1, 1, 0, 0, 0)), content)
    return file.getvalue()


GOOD = "de\tGuten Tag\tGood day\nfr\tMerci à tous\tThanks to all\n".encode()


@pytest.mark.parametrize(
    ("name", "opener"),
    [("a.tsv", open), ("a.tsv.gz", gzip.open), ("a.tsv.xz", lzma.open), ("a.tsv.bz2", bz2.open)],
)
def test_reads_plain_and_compressed_files(tmp_path, name, opener):
    path = write(tmp_path / name, GOOD, opener)
    rows = reader(train=path, test=path).rows("train")
    assert rows == [
        ("de", "Guten Tag", "Good day", path, 1),
        ("fr", "Merci à tous", "Thanks to all", path, 2),
    ]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = write(tmp_path / "a.tsv", b"\xef\xbb\xbfde\tJa\tYes\r\nde\tNein\tNo")
    rows = reader(train=path, test=path).rows("train")
    assert [row[:3] for row in rows] == [("de", "Ja", "Yes"), ("de", "Nein", "No")]


def test_globs_and_lists(tmp_path):
    for name in "ba":
        write(tmp_path / f"{name}.tsv", f"de\t{name}\t{name * 2}\n".encode())
    r = reader(train=(str(tmp_path / "[ab].tsv"), str(tmp_path / "b.tsv")), test="x")
    assert [row.source for row in r.rows("train")] == ["a", "b", "b"]


@pytest.mark.parametrize(
    "header", ["language\tsource\ttarget", "Lang\tde\ten", "source\ttarget\tlanguage"]
)
def test_a_row_with_the_names_of_columns_is_left_out(tmp_path, header):
    path = write(tmp_path / "a.tsv", header.encode() + b"\n" + GOOD)
    r = reader(train=path, test=path)
    assert [(row.language, row.line) for row in r.rows("train")] == [("de", 2), ("fr", 3)]
    assert r.left_out == {tsv.HEADER: 1} and r.examples[tsv.HEADER].startswith(f"{path}:1: ")


def test_only_the_first_row_names_columns(tmp_path):
    path = write(tmp_path / "a.tsv", GOOD + b"language\tSprache\tlanguage\n")
    assert [row.language for row in reader(train=path, test=path).rows("train")][2] == "language"


def test_rows_of_two_columns_have_the_language_of_the_setting(tmp_path):
    path = write(tmp_path / "a.tsv", b"source\ttarget\nJa\tYes\nfr\tOui\tYes\n")
    r = reader(train=path, test=path, language="de")
    assert [row[:3] for row in r.rows("train")] == [("de", "Ja", "Yes"), ("fr", "Oui", "Yes")]
    with pytest.raises(ValueError, match="a.tsv:2: wrong number of columns"):
        reader(train=path, test=path).rows("train")


def test_links_to_files_of_the_same_glob_are_read_once(tmp_path):
    path = write(tmp_path / "b.tsv", GOOD)
    (tmp_path / "a.tsv").symlink_to(path)
    (tmp_path / "c.tsv").symlink_to(path)
    r = reader(train=f"{tmp_path}/*.tsv", test="x")
    assert {row.file for row in r.rows("train")} == {path} and len(r.rows("train")) == 2
    assert r.file_notes == [
        f"{tmp_path}/*.tsv: 2 of 3 files are links to others of them and are not read again, such "
        f"as {tmp_path}/a.tsv"
    ]
    # A file that is named twice is read twice.
    assert len(reader(train=(path, f"{tmp_path}/a.tsv"), test="x").rows("train")) == 4


BAD_ROWS = [
    (b"de\tJa\n", 2, "wrong number of columns"),
    (b"de\tJa\tYes\tmore\n", 2, "wrong number of columns"),
    (b"de,Ja,Yes\n", 2, "wrong number of columns"),
    (b"\n", 2, "wrong number of columns"),
    (b"de\tJ\xff\tYes\n", 2, "not UTF-8"),
    (b"de\tJ\0\tYes\n", 2, "NUL bytes"),
    (b"\tJa\tYes\n", 2, "no language code"),
    (b"Guten Tag\tGood day\tde\n", 2, "no language code"),
]


@pytest.mark.parametrize(("bad", "line", "reason"), BAD_ROWS)
def test_an_invalid_row_raises_with_file_and_line(tmp_path, bad, line, reason):
    path = write(tmp_path / "a.tsv", b"de\tJa\tYes\n" + bad + b"de\tNein\tNo\n")
    with pytest.raises(ValueError, match=f"{path}:{line}: {reason}"):
        reader(train=path, test=path).rows("train")


@pytest.mark.parametrize(
    ("row", "way_out"),
    [
        ("Haus\thouse\tCC-BY 2.0 (France)", "the second is the source, the third the target"),
        ("de,Haus,house", "the QuotedReader as input.corpus reads CSV"),
        ("Haus\thouse", "input.corpus.language"),
        ("Haus house", "input.corpus.language"),
    ],
)
def test_columns_that_are_set_apart_or_ordered_otherwise_have_a_way_out(tmp_path, row, way_out):
    row = row.replace("Haus", "Das Haus")
    path = write(tmp_path / "a.tsv", row.encode() + b"\n")
    with pytest.raises(ValueError, match=way_out):
        reader(train=path, test=path).rows("train")


@pytest.mark.parametrize(("bad", "line", "reason"), BAD_ROWS)
def test_invalid_rows_can_be_skipped_and_counted(tmp_path, bad, line, reason):
    path = write(tmp_path / "a.tsv", b"de\tJa\tYes\n" + bad + b"de\tNein\tNo\n")
    r = reader(train=path, test=path, on_bad_row="skip")
    assert [(row.source, row.line) for row in r.rows("train")] == [("Ja", 1), ("Nein", 3)]
    assert r.left_out == {reason: 1}
    assert r.examples[reason].startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_missing_file_is_never_skipped(tmp_path, split, on_bad_row):
    there = write(tmp_path / "pairs.tsv", GOOD)
    paths = dict.fromkeys(("train", "dev", "test"), there)

    def error(path):
        r = reader(**paths | {split: str(path)}, on_bad_row=on_bad_row)
        with pytest.raises(ValueError) as raised:
            r.check_files()
        with pytest.raises(ValueError, match=re.escape(str(raised.value))):
            r.rows(split)
        return str(raised.value).removeprefix(f"input.corpus.{split}: ")

    near = tmp_path / "pair.tsv"
    assert error(near) == f"{near}: no such file. Did you mean '{there}'?"
    inside = tmp_path / "none" / "a.tsv"
    assert error(inside) == f"{inside}: no such file; there is no directory {tmp_path}/none"
    assert error(tmp_path / "*.csv") == f"{tmp_path}/*.csv: no file matches this glob"
    assert error(tmp_path).startswith(f"{tmp_path}: a directory, but a file was expected; ")


def test_a_file_without_permission_is_never_skipped(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tsv", GOOD)
    # The tests' user may be root, who may read everything.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=f"{path}: permission denied"):
        reader(train=path, on_bad_row="skip").rows("train")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (gzip.compress(GOOD, mtime=0), "its name must end in .gz"),
        (lzma.compress(GOOD), "its name must end in .xz"),
        (bz2.compress(GOOD), "its name must end in .bz2"),
        (zipped(GOOD), "the file is a zip archive: unpack it"),
        ("de\tJa\tYes\n".encode("utf-16"), "the file is in UTF-16"),
        ("de\tJa\tYes\n".encode("utf-16-le"), "the file seems to be in UTF-16LE"),
        ("de\tJa\tYes\n".encode("utf-16-be"), "the file seems to be in UTF-16BE"),
        (b"de\tJa\0\tYes\n", "NUL bytes: no text has any"),
        (b"\0" * 64 + b"\n", "NUL bytes: no text has any"),
        ("de\tSch\xf6n\tFine\n".encode("latin-1"), "byte 6 of the line is 0xf6"),
        (GOOD.replace(b"\n", b"\r"), "the line has carriage returns in it"),
    ],
)
def test_the_error_says_what_a_file_is_instead(tmp_path, content, hint):
    path = write(tmp_path / "a.tsv", content)
    with pytest.raises(ValueError, match=f"{path}:1: .*{hint}"):
        reader(train=path, test=path).rows("train")


@pytest.mark.parametrize(
    ("name", "opener"), [("a.gz", gzip.open), ("a.xz", lzma.open), ("a.bz2", bz2.open)]
)
def test_truncated_file(tmp_path, name, opener):
    path = write(tmp_path / name, GOOD * 1000, opener)
    with open(path, "rb") as file:
        content = file.read()
    write(path, content[:-9])
    with pytest.raises(ValueError, match=rf"{path}:\d+: the file cannot be read"):
        reader(train=path).rows("train")
    write(path, b"not compressed at all")
    with pytest.raises(ValueError, match=f"{path}:1: the file cannot be read"):
        reader(train=path).rows("train")


def test_the_embedded_corpus_matches_its_notice():
    corpus = tsv.EmbeddedCorpus.params().instantiate()
    splits = {split: corpus.rows(split) for split in ("dev", "test", "train")}
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 697396,
        "dev": 5522,
        "test": 10429,
    }
    counts = collections.Counter(row.language for row in splits["train"])
    assert len(counts) == 99
    assert sum(count >= 1000 for count in counts.values()) == 59
    english = {split: {row.target for row in rows} for split, rows in splits.items()}
    assert not english["train"] & (english["dev"] | english["test"])
