# tests: wings/preparation/part_readers.py, wings/preparation/sources.py
# tests: wings/preparation/token_ids.py
"""Tests records of tf.train.Example, which TensorFlow writes, in TFRecord and ArrayRecord files."""

import json
import pathlib
import shlex

import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from array_record.python import array_record_module

from lingvo_gshard.core import UserError
from lingvo_gshard.data.vocabularies.files import load_pair
from lingvo_gshard.tools import prepare as prepare_tool
from lingvo_gshard.wings.preparation import token_ids
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.table import PreparedTable
from lingvo_gshard.wings.preparation.sources import Source
from tests.preparation import raw
from tests.test_docs import commands

ROWS = raw.rows(60)
EXPECTED = sorted(("train", *row) for row in ROWS)


def example(**features):
    """Returns a record of texts, lists of ids, or floats."""
    made = {}
    for name, value in features.items():
        if isinstance(value, str | bytes):
            value = [value.encode() if isinstance(value, str) else value]
            made[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
        elif isinstance(value, float):
            made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        else:
            made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


def write(path, records):
    """Writes records as the path's name says, and returns the path."""
    if "array_record" in path.name:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    else:
        writer = tf.io.TFRecordWriter(str(path), "GZIP" if path.name.endswith(".gz") else "")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def records_of(rows):
    return [example(inputs=b, targets=c, language=a, weight=1.0) for a, b, c in rows]


NAMES = ["a.tfrecord", "a.tfrecord.gz", "a.tfrecord-00000-of-00002", "a.array_record"]


@pytest.mark.parametrize("name", NAMES)
def test_texts(tmp_path, name):
    path = write(tmp_path / name, records_of(ROWS))
    directory, _ = raw.run(tmp_path, [f"{path},split=train"])
    assert raw.texts(directory) == EXPECTED


def sentencepiece(tmp_path):
    """Prepares texts, and returns their vocabulary and its file."""
    directory, _ = raw.run(
        tmp_path, [raw.write_tsv(tmp_path / "rows.tsv", ROWS) + ",split=train"], output="texts"
    )
    return load_pair(directory)[0], str(directory / "joint.model")


def ids_of(directory):
    """Returns the sorted (source, target) of the rows of prepared data."""
    table = PreparedTable(directory, manifest.read(directory), "train")
    records = table.read(np.arange(len(table)))
    sides = [
        np.split(tokens.ids, tokens.offsets[1:-1]) for tokens in (records.sources, records.targets)
    ]
    return sorted((a.tolist(), b.tolist()) for a, b in zip(*sides, strict=True))


@pytest.mark.parametrize("end", [[], [2]])
@pytest.mark.parametrize("name", ["a.tfrecord", "a.jsonl", "a.parquet"])
def test_pairs_of_ids_are_those_of_their_texts(tmp_path, end, name):
    vocabulary, file = sentencepiece(tmp_path)
    rows = [(a, vocabulary.encode(b) + end, vocabulary.encode(c) + end) for a, b, c in ROWS]
    given = [{"language": a, "inputs": b, "targets": c} for a, b, c in rows]
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    elif name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), path)
    else:
        write(path, [example(**row) for row in given])
    params = raw.params(tmp_path / "cache")
    params.vocabulary.files = (file,)
    source = Source(
        str(path), split="train", tokens="ids", source_field="inputs", target_field="targets"
    )
    prepare(tmp_path / "out", [source], PrepareOptions(params, 1))
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "texts")
    assert raw.texts(tmp_path / "out") == EXPECTED


def test_rows_of_ids_are_lists_of_integers_alone():
    assert token_ids.to_text([3, 1]) == "3 1" and token_ids.to_text([]) == ""
    for wrong in ([True, 2], [1.0], ["1"], "1 2", 3, None):
        assert token_ids.to_text(wrong) is None


def test_text_without_ids_is_refused(tmp_path):
    path = write(tmp_path / "a.tfrecord", records_of(ROWS))
    params = raw.params(tmp_path / "cache")
    params.vocabulary.files = (sentencepiece(tmp_path)[1],)
    words = r"a.tfrecord:1: a field is missing or no text: expected token ids in 'inputs' and 'targ"
    with pytest.raises(UserError, match=words):
        prepare(tmp_path / "out", [f"{path},tokens=ids"], PrepareOptions(params, 1))


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (example(inputs=b"\xff", targets="a"), r"found .*inputs \(list\)"),
        (example(inputs=[1, 2], targets="a"), r"found .*inputs \(list\)"),
        (example(targets="a"), r"found targets \(str\)"),
        (b"\xff no record", "found none"),
    ],
    ids=["bytes", "ids", "no input", "no record"],
)
def test_a_record_without_texts_is_refused_by_number_or_counted(tmp_path, bad, found):
    records = records_of(ROWS)
    path = write(tmp_path / "a.tfrecord", [*records[:7], bad, *records[7:]])
    with pytest.raises(UserError, match=f"^{path}:8: .*expected text in 'inputs'.*{found}"):
        raw.run(tmp_path, [str(path)], output="refused")
    directory, prepared = raw.run(tmp_path, [f"{path},split=train"], 1, "skip", "out")
    assert raw.texts(directory) == EXPECTED
    assert [one.rows for one in prepared.rejections] == [1]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_record_ends_its_file(tmp_path, name):
    path = write(tmp_path / name, records_of(ROWS))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}:\d+: the file cannot be read: "):
        raw.run(tmp_path, [str(path)], output="refused")
    more = write(tmp_path / "more.tfrecord", records_of(ROWS[-3:]))
    sources = [f"{path},split=train", f"{more},split=train"]
    directory, prepared = raw.run(tmp_path, sources, 1, "skip", "out")
    kept = raw.texts(directory)
    assert set(kept) < set(EXPECTED)
    reasons = {one.reason: one.rows for one in prepared.rejections}
    assert reasons["the file cannot be read"] == 1


def test_the_commands_of_the_page(tmp_path, monkeypatch):
    vocabulary, file = sentencepiece(tmp_path)
    (tmp_path / "sentencepiece.model").write_bytes(pathlib.Path(file).read_bytes())
    write(tmp_path / "wmt.tfrecord-00000-of-00001", records_of(ROWS))
    ids = [example(inputs=vocabulary.encode(b), targets=vocabulary.encode(c)) for _, b, c in ROWS]
    write(tmp_path / "cached.tfrecord-00000-of-00001", ids)
    write(tmp_path / "c4.array_record", [example(text=f"{b} {c}") for _, b, c in ROWS])
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
    found = [each for each in commands(page) if "--output=from_" in each]
    assert len(found) == 3
    for command in found:
        prepare_tool.main(
            [*shlex.split(command), "--workers=1", "--gin_param=held_out_per_mille = 0"]
        )
    assert raw.texts(tmp_path / "from_texts") == EXPECTED
    assert raw.texts(tmp_path / "from_ids") == sorted(("train", "de", *row[1:]) for row in ROWS)
    expected = sorted(("train", "und", "", f"{b} {c}") for _, b, c in ROWS)
    assert raw.texts(tmp_path / "from_c4") == expected


def test_what_needs_a_local_file(tmp_path):
    with pytest.raises(UserError, match="files of format=tfrecord are read from local disks only"):
        raw.run(tmp_path, ["gs://bucket/a.tfrecord"])
