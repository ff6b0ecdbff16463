"""Tests MosesReader: pairs by prefix, and errors for sides that do not match."""

import gzip

import pytest

from lingvo_gshard.wings.preparation.formats import moses


def reader(**values):
    return moses.MosesReader.params().set(**values).instantiate()


def write(path, text):
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_reads_every_language_of_a_prefix(tmp_path):
    write(tmp_path / "train.en", "one\ntwo\n")
    write(tmp_path / "train.de", "eins\nzwei\n")
    write(tmp_path / "train.pt_BR.gz", "um\ndois\n")
    write(tmp_path / "train.readme", "not a language\n")
    rows = reader(train=str(tmp_path / "train"), test="x").rows("train")
    assert [row[:3] for row in rows] == [
        ("de", "eins", "one"),
        ("de", "zwei", "two"),
        ("pt_BR", "um", "one"),
        ("pt_BR", "dois", "two"),
    ]
    assert rows[1].file == str(tmp_path / "train.de") and rows[1].line == 2


def test_an_opus_folder_has_one_pair(tmp_path):
    """As OPUS packs its corpora: alignments and identifiers have as many lines as the texts."""
    for name in ("README", "LICENSE"):
        write(tmp_path / name, "one\ntwo\n")
    texts = {"de": "eins\nzwei\n", "en": "one\ntwo\n", "ids": "a.xml\nb.xml\n", "xml": "<a/>\n\n"}
    for ending, text in texts.items():
        write(tmp_path / f"Corp.de-en.{ending}", text)
    for pattern in ("Corp.de-en", "*"):
        r = reader(train=str(tmp_path / pattern), test="x")
        assert [row[:3] for row in r.rows("train")] == [
            ("de", "eins", "one"),
            ("de", "zwei", "two"),
        ]
        assert len(r.file_notes) == 2
        assert f"{tmp_path}/Corp.de-en.ids is not read: it is no side of a pair" in r.file_notes[0]
    other = reader(train=str(tmp_path / "Corp.de-en"), test="x", target_language="de")
    assert [row[:3] for row in other.rows("train")] == [
        ("en", "one", "eins"),
        ("en", "two", "zwei"),
    ]


def test_files_of_other_kinds_are_no_languages(tmp_path):
    for ending in ("en", "de", "txt", "tsv", "xml.gz"):
        write(tmp_path / f"train.{ending}", "one\n")
    r = reader(train=str(tmp_path / "train"), test="x")
    assert [row.language for row in r.rows("train")] == ["de"]
    names = [note.partition(" ")[0] for note in r.file_notes]
    assert names == [str(tmp_path / f"train.{ending}") for ending in ("tsv", "txt", "xml.gz")]


def test_a_pair_in_the_name_of_a_prefix_whose_files_have_other_languages(tmp_path):
    for ending in ("en", "de", "fr"):
        write(tmp_path / f"my-en.{ending}", "one\n")
    rows = reader(train=str(tmp_path / "my-en"), test="x").rows("train")
    assert [row.language for row in rows] == ["de", "fr"]


def test_only_the_named_source_language_is_read(tmp_path):
    for ending in ("en", "de", "fr", "txt"):
        write(tmp_path / f"train.{ending}", "one\n")
    for language in ("fr", "txt"):
        r = reader(train=str(tmp_path / "train"), test="x", source_language=language)
        assert [row.language for row in r.rows("train")] == [language] and not r.file_notes
    with pytest.raises(ValueError, match=r"train\.nl was expected$"):
        reader(train=str(tmp_path / "train"), test="x", source_language="nl").rows("train")


def test_a_glob_finds_the_pairs_of_the_named_source_language(tmp_path):
    for name in ("de", "fr"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"train.{name}", f"{name}\n")
        write(tmp_path / name / "train.en", "one\n")
    r = reader(train=str(tmp_path / "*" / "train"), test="x", source_language="fr")
    assert [row[:3] for row in r.rows("train")] == [("fr", "fr", "one")]
    with pytest.raises(ValueError, match="no file matches this glob"):
        reader(train=str(tmp_path / "*" / "train"), source_language="nl").rows("train")


def test_a_target_may_be_linked_beside_each_source(tmp_path):
    for name in ("de", "fr"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"train.{name}", f"{name}\n")
    write(tmp_path / "de" / "train.en", "one\n")
    (tmp_path / "fr" / "train.en").symlink_to(tmp_path / "de" / "train.en")
    rows = reader(train=str(tmp_path / "*" / "train"), test="x").rows("train")
    assert [row[:3] for row in rows] == [("de", "de", "one"), ("fr", "fr", "one")]


def test_globs_of_prefixes_and_another_target_language(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.fr.gz", f"{name}\n")
        write(tmp_path / name / "train.de", f"{name}!\n")
    r = reader(train=str(tmp_path / "*" / "train"), test="x", target_language="fr")
    assert [row[:3] for row in r.rows("train")] == [("de", "a!", "a"), ("de", "b!", "b")]


@pytest.mark.parametrize(
    ("source", "target", "short"), [("1\n2\n3\n", "1\n2\n", "en"), ("1\n", "1\n2\n3\n", "de")]
)
def test_rejects_sides_of_different_lengths(tmp_path, source, target, short):
    write(tmp_path / "train.de", source)
    write(tmp_path / "train.en", target)
    write(tmp_path / "train.fr", target)
    prefix = str(tmp_path / "train")
    line = min(source.count("\n"), target.count("\n")) + 1
    with pytest.raises(ValueError, match=f"{prefix}.{short}:{line}: sides of unequal length"):
        reader(train=prefix, test="x").rows("train")
    skipping = reader(train=prefix, test="x", on_bad_row="skip")
    assert {row.language for row in skipping.rows("train")} == {"fr"}
    assert skipping.left_out == {"sides of unequal length": 3}


@pytest.mark.parametrize("side", ["de", "en"])
def test_invalid_utf8_does_not_shift_the_alignment(tmp_path, side):
    write(tmp_path / "train.de", "1\n2\n3\n")
    write(tmp_path / "train.en", "one\ntwo\nthree\n")
    path = tmp_path / f"train.{side}"
    for bad_line in (2, 3):
        lines = path.read_bytes().split(b"\n")
        lines[bad_line - 1] = b"\xff"
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(ValueError, match=f"{path}:2: not UTF-8"):
            reader(train=str(tmp_path / "train"), test="x").rows("train")
    skipping = reader(train=str(tmp_path / "train"), test="x", on_bad_row="skip")
    assert [row[:3] for row in skipping.rows("train")] == [("de", "1", "one")]
    assert skipping.left_out == {"not UTF-8": 2}


def test_rejects_missing_sides(tmp_path):
    prefix = str(tmp_path / "train")
    with pytest.raises(ValueError, match=f"input.corpus.train: {prefix}.en: no such file"):
        reader(train=prefix).rows("train")
    with pytest.raises(ValueError, match="no file matches this glob"):
        reader(train=prefix + "*", on_bad_row="skip").rows("train")
    write(tmp_path / "train.en", "one\n")
    with pytest.raises(ValueError, match=f"{prefix}.en: there is no source file"):
        reader(train=prefix).rows("train")
