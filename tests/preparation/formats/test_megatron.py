# tests: wings/preparation/formats/megatron.py, wings/preparation/token_ids.py
"""Tests token ids of Megatron's indexed data sets, written here by the published format."""

import pathlib
import shlex
import struct

import numpy as np
import pytest

from lingvo_gshard.core import UserError
from lingvo_gshard.data.vocabularies.files import load_pair
from lingvo_gshard.tools import prepare as prepare_tool
from lingvo_gshard.wings.preparation import sources
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import NEAR_DUPLICATE
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.language_model_input import PreparedLanguageModelInput
from lingvo_gshard.wings.preparation.prepared.table import PreparedTable
from lingvo_gshard.wings.preparation.vocabularies import others
from tests.preparation import raw
from tests.preparation.vocabularies.test_json_vocabulary import tokenizer
from tests.test_docs import commands

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def write(path, documents, kind="u2", code=None, version=1, modes=b""):
    """Writes documents, each a list of sequences of ids, and returns the file of ids."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    width = np.dtype(kind).itemsize
    begins = [width * sum(lengths[:place]) for place in range(len(lengths))]
    firsts = np.cumsum([0, *map(len, documents)])
    header = struct.pack("<9sQB", b"MMIDIDX\0\0", version, code or CODES[kind])
    header += struct.pack("<QQ", len(sequences), len(firsts))
    tables = (np.array(lengths, "<i4"), np.array(begins, "<i8"), firsts.astype("<i8"))
    path.with_suffix(".idx").write_bytes(header + b"".join(t.tobytes() for t in tables) + modes)
    path.write_bytes(b"".join(np.array(sequence, f"<{kind}").tobytes() for sequence in sequences))
    return path


def vocabulary(tmp_path):
    """Writes a tokenizer.json, and returns its path, its size and the id that ends texts."""
    made = tokenizer(["<|endoftext|>"])
    (tmp_path / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    return str(tmp_path / "tokenizer.json"), made.get_vocab_size(), 0


def run(tmp_path, *given, on_bad_row="refuse", output="out", **values):
    params = raw.params(tmp_path / "cache", **values)
    params.vocabulary.files = (vocabulary(tmp_path)[0],)
    return prepare(tmp_path / output, list(given), PrepareOptions(params, 1, on_bad_row))


def ids_of(tmp_path, split="train", output="out"):
    """Returns the ids of the rows of prepared data, sorted."""
    table = PreparedTable(tmp_path / output, manifest.read(tmp_path / output), split)
    targets = table.read(np.arange(len(table))).targets
    return sorted(part.tolist() for part in np.split(targets.ids, targets.offsets[1:-1]))


def documents_of(count, size, seed=0):
    """Returns documents of one to three sequences without the id 0."""
    draw = np.random.default_rng(seed)
    return [
        [draw.integers(1, size, draw.integers(3, 9)).tolist() for _ in range(draw.integers(1, 4))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["u1", "i2", "i4", "i8", "u2"])
def test_documents_keep_their_ids_in_every_type(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "PART_LINES", 7)
    _, size, end = vocabulary(tmp_path)
    documents = documents_of(40, min(size, 120))
    # As --append-eod writes it. Each row ends so, however the documents do.
    for document in documents[::2]:
        document[-1].append(end)
    path = write(tmp_path / "books.bin", documents, kind)
    found = run(tmp_path, f"{path},language=de", held_out_per_mille=0)
    expected = [[*sum(document, [])] for document in documents]
    expected = sorted(ids if ids[-1] == end else [*ids, end] for ids in expected)
    assert ids_of(tmp_path) == expected
    assert list(found.languages) == ["de"]
    assert [file.path for file in found.sources[0].files] == [
        str(path),
        str(path.with_suffix(".idx")),
    ]


def test_rows_train_and_are_packed(tmp_path):
    _, size, end = vocabulary(tmp_path)
    documents = documents_of(60, size)
    run(tmp_path, f"{write(tmp_path / 'books.bin', documents)},split=train")
    data = (
        PreparedLanguageModelInput.params()
        .set(directory=str(tmp_path / "out"), batch_rows=2, length=64)
        .instantiate()
    )
    assert data.vocabulary.size == size == load_pair(tmp_path / "out")[0].size
    expected = {(*sum(document, []), end) for document in documents}
    batches, found = data.train_batches(0), set()
    while len(found) < len(expected):
        batch = next(batches)
        for labels, segments in zip(batch["target_labels"], batch["target_segments"], strict=True):
            assert segments.max() > 1
            found |= {tuple(labels[segments == n].tolist()) for n in range(1, segments.max() + 1)}
    batches.close()
    assert found == expected


def test_copies_and_leaks_are_found_among_ids(tmp_path):
    _, size, _ = vocabulary(tmp_path)
    documents = np.random.default_rng(0).integers(1, size, (400, 1, 20)).tolist()
    twice = [*documents, *documents[:5]]
    # Copies with another beginning have most 4-grams in common.
    similar = [[[1, 2], *document] for document in documents[100:]]
    path = write(tmp_path / "books.bin", [*twice, *similar])
    found = run(tmp_path, str(path), held_out_per_mille=100)
    reasons = {one.reason: one.rows for one in found.rejections}
    assert reasons.pop("a duplicate") == 5
    assert list(reasons) == ["held out, but half of its target's 4-grams are in train"]
    ends = {split: {tuple(ids[-6:]) for ids in ids_of(tmp_path, split)} for split in found.splits}
    assert ends["dev"] and not ends["dev"] & ends["train"]
    assert ends["test"] and not ends["test"] & ends["train"]


def test_near_copies_are_found_among_ids_by_two_workers(tmp_path):
    _, size, _ = vocabulary(tmp_path)
    documents = np.random.default_rng(0).integers(1, size, (20, 1, 40)).tolist()
    near = [[[*documents[3][0][:-1], 1]], [[*documents[9][0], 2]]]
    path = write(tmp_path / "books.bin", [*documents, *near])
    params = raw.params(tmp_path / "cache", held_out_per_mille=0)
    params.vocabulary.files = (vocabulary(tmp_path)[0],)
    params.documents.near_duplicates.similarity = 0.8
    found = prepare(tmp_path / "out", [str(path)], PrepareOptions(params, workers=2))
    assert [(one.rows, one.reason) for one in found.rejections] == [(2, NEAR_DUPLICATE)]
    assert len(ids_of(tmp_path)) == 20


def test_an_id_outside_of_the_vocabulary_is_named_with_its_document(tmp_path):
    _, size, _ = vocabulary(tmp_path)
    documents = documents_of(30, size)
    documents[11][-1].append(size + 1000)
    path = write(tmp_path / "books.bin", documents)
    words = rf"^{path}:12: an id is not in the vocabulary: {size + 1000:,}; vocabulary.files has"
    with pytest.raises(UserError, match=words):
        run(tmp_path, str(path), output="refused")
    found = run(tmp_path, f"{path},split=train", on_bad_row="skip")
    assert len(ids_of(tmp_path)) == 29
    assert [one.rows for one in found.rejections] == [1]


def damaged(path, place, content):
    """Overwrites bytes of a file."""
    old = path.read_bytes()
    path.write_bytes(old[:place] + content + old[place + len(content) :])


@pytest.mark.parametrize(
    ("end", "place", "content", "message"),
    [
        ("idx", 0, b"TNTIDX\0\0\0", r"idx, byte 0: b'MMIDIDX"),
        ("idx", 9, b"\2", r"idx, byte 9: version 2; 1 was expected"),
        ("idx", 17, b"\7", r"idx, byte 17: ids of type 7, not 1, 2, 3, 4, 5, 8"),
        ("idx", 18, b"\x99", r"idx, byte \d+: the file ends"),
        # The length of sequence 1, the beginning of sequence 2, the end of document 1.
        ("idx", 38, struct.pack("<i", -5), r"idx, byte 38: -5 is there; 0 was expected"),
        ("idx", 34 + 4 * 4 + 16, b"\1", r"idx, byte 66: 1 is there; 12 was expected"),
        ("idx", 34 + 12 * 4 + 16, b"\x63", r"idx, byte 98: 99 is there; 4 was expected"),
        ("bin", -1, b"", r"bin, byte 23: the file ends; \S+idx has 24 bytes"),
    ],
)
def test_damage_is_refused_with_file_and_byte(tmp_path, end, place, content, message):
    path = write(tmp_path / "books.bin", [[[1, 2], [3, 4, 5, 6]], [[7, 8, 9]], [[5, 6, 7]]])
    if content:
        damaged(path.with_suffix(f".{end}"), place, content)
    else:
        path.write_bytes(path.read_bytes()[:place])
    with pytest.raises(UserError, match=f"books.bin:1: the file cannot be read: .*{message}"):
        run(tmp_path, str(path))


def test_what_is_no_data_set_of_ids_is_refused(tmp_path):
    path = write(tmp_path / "books.bin", [[[1, 2, 3]]], modes=b"\0")
    with pytest.raises(UserError, match="modes of sequences"):
        run(tmp_path, str(path))
    path.with_suffix(".idx").unlink()
    with pytest.raises(UserError, match=r"books\.idx is missing"):
        run(tmp_path, str(path))
    with pytest.raises(UserError, match=r"has token ids: `vocabulary.files` must name"):
        raw.run(tmp_path, [str(path)])
    (tmp_path / "more.txt").write_text("a text\n")
    with pytest.raises(UserError, match=r"is token ids and `source=\S+more.txt` text; prepare"):
        run(tmp_path, str(path), str(tmp_path / "more.txt"))
    with pytest.raises(UserError, match="files of megatron have content=text, not pairs"):
        run(tmp_path, f"{path},content=pairs")


def test_the_command_of_the_page(tmp_path, monkeypatch):
    _, size, end = vocabulary(tmp_path)
    documents = documents_of(30, size)
    write(tmp_path / "corpus_text_document.bin", documents)
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
    (command,) = [each for each in commands(page) if "--output=books" in each]
    prepare_tool.main([*shlex.split(command), "--workers=1", "--gin_param=held_out_per_mille = 0"])
    assert ids_of(tmp_path, output="books") == sorted([*sum(d, []), end] for d in documents)


def test_a_directory_of_a_published_model_names_its_tokenizer(tmp_path):
    path, size, _ = vocabulary(tmp_path)
    assert others.paths_of(str(tmp_path)) == others.paths_of(path) == (path,)
    assert others.of_others(str(tmp_path))[0].size == size
    with pytest.raises(UserError, match="Is a directory; a SentencePiece model or a tokenizer.jso"):
        others.of_others(str(tmp_path.parent))
