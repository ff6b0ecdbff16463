# tests: wings/preparation/sources.py, wings/preparation/parts.py, wings/preparation/part_readers.py
# tests: wings/preparation/formats/fields.py, wings/preparation/formats/datasets.py
# tests: wings/preparation/formats/archives.py
"""Tests that rows of every format come out, however files are cut into parts."""

import csv
import gzip
import io
import json
import tarfile
import zipfile

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from lingvo_gshard.wings.preparation import preparation
from lingvo_gshard.wings.preparation import sources as survey
from lingvo_gshard.wings.preparation.formats import archives
from tests.preparation import raw

ROWS = raw.rows(150)
EXPECTED = sorted(("train", *row) for row in ROWS)


def _prepared(tmp_path, monkeypatch, *sources, **values):
    monkeypatch.setattr(survey, "PART_LINES", 40)
    directory, prepared = raw.run(
        tmp_path, [f"{source},split=train" for source in sources], **values
    )
    return raw.texts(directory), prepared


def test_json_lines(tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    objects = ({"language": a, "src": b, "target": c, "id": 7} for a, b, c in ROWS)
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects))
    found, _ = _prepared(tmp_path, monkeypatch, f"{path},source_field=src")
    assert found == EXPECTED
    message = rf"^{path}:1: a field is missing or no text: expected text in 'source' and 'target'"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [str(path)], output="other")


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "pairs.parquet"
    columns = dict(zip(("language", "source", "target"), zip(*ROWS, strict=True), strict=True))
    table = pyarrow.table(columns | {"score": [1.0] * len(ROWS)})
    pyarrow.parquet.write_table(table, path, row_group_size=40)
    found, prepared = _prepared(tmp_path, monkeypatch, path)
    assert found == EXPECTED
    assert prepared.sources[0].files[0].bytes == path.stat().st_size
    nested = pyarrow.table({"texts": [{"en": "a", "hau": "b"}] * 3, "language": ["de"] * 3})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    message = r"nested\.parquet:1: .*expected columns of text 'source' and 'target'; found texts"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [str(tmp_path / "nested.parquet")], output="nested")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"^{path}:1: the file cannot be read: "):
        raw.run(tmp_path, [str(path)], output="other")


def nested(row):
    """Returns a row as data sets of Hugging Face have it."""
    language, source, target = row
    return {"id": "7", "translation": {"en": target, language: source}}


def test_translations_of_variable_languages(tmp_path):
    # As TFDS and Hugging Face's datasets have several translations of one language.
    columns = [{"language": [a, "en", "en"], "translation": [b, c, "another"]} for a, b, c in ROWS]
    path = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"translation": columns}), path)
    directory, _ = raw.run(tmp_path, [f"{path},split=train"])
    assert raw.texts(directory) == EXPECTED


def test_translations_by_language(tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(nested(row)) + "\n" for row in ROWS))
    found, _ = _prepared(tmp_path, monkeypatch, path)
    assert found == EXPECTED
    for language in ("de", "fr"):
        rows = [nested(row)["translation"] for row in ROWS if row[0] == language]
        table = pyarrow.table({"translation": rows})
        pyarrow.parquet.write_table(table, tmp_path / f"{language}.parquet", row_group_size=40)
    raw.run(tmp_path, [f"{tmp_path}/*.parquet,split=train"], output="columns")
    assert raw.texts(tmp_path / "columns") == EXPECTED


def save(folder, tables):
    """Writes tables as save_to_disk of Hugging Face's datasets does."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(tables):05}.arrow" for n in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=16)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


def test_data_sets_that_save_to_disk_wrote(tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    parts = (ROWS[:70], ROWS[70:])
    save(
        folder / "train",
        [
            pyarrow.table(
                {"id": range(len(p)), "translation": [nested(r)["translation"] for r in p]}
            )
            for p in parts
        ],
    )
    found, prepared = _prepared(tmp_path, monkeypatch, folder / "train")
    assert found == EXPECTED
    assert len(prepared.sources[0].files) == 2
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    message = f"the data set has the splits train, test; name each .*, as in {folder}/train"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [str(folder)], output="other")
    save(tmp_path / "texts", [pyarrow.table({"text": ["One text.", "Another text."]})])
    raw.run(tmp_path, [f"{tmp_path}/texts,content=text,split=train"], output="texts_out")
    assert [row[3] for row in raw.texts(tmp_path / "texts_out")] == ["Another text.", "One text."]
    with pytest.raises(ValueError, match="expected columns of text 'source' and 'target'; found t"):
        raw.run(tmp_path, [f"{tmp_path}/texts"], output="pairs")
    (tmp_path / "texts" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ValueError, match="data-00000-of-00001.arrow is missing"):
        raw.run(tmp_path, [f"{tmp_path}/texts,content=text"], output="gone")


def test_several_languages_of_one_target(tmp_path):
    path = tmp_path / "pairs.jsonl"
    texts = {"en": "a house", "de": "ein Haus", "hau": "gida", "fr": None}
    path.write_text(json.dumps({"translation": texts}) + "\n")
    raw.run(tmp_path, [f"{path},split=train"], output="all")
    rows = [("train", "de", "ein Haus", "a house"), ("train", "hau", "gida", "a house")]
    assert raw.texts(tmp_path / "all") == rows
    raw.run(tmp_path, [f"{path},split=train,target_language=hau,language=de"], output="one")
    assert raw.texts(tmp_path / "one") == [("train", "de", "ein Haus", "gida")]
    message = "pairs.jsonl:1: .*expected text in 'fr' and 'en'; found en"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [f"{path},split=train,language=fr"], output="none")


def test_fields_within_objects(tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    objects = ({"meta": {"lang": a}, "texts": {"x": b, "y": c}} for a, b, c in ROWS)
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects))
    fields = "language_field=meta.lang,source_field=texts.x,target_field=texts.y"
    found, _ = _prepared(tmp_path, monkeypatch, f"{path},{fields}")
    assert found == EXPECTED


@pytest.mark.parametrize(("delimiter", "name"), [(",", "comma"), ("\t", "tab"), (";", "semicolon")])
def test_csv(tmp_path, monkeypatch, delimiter, name):
    path = tmp_path / "pairs.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerow(("target", "id", "language", "source"))
        writer.writerows((c, 7, a, b) for a, b, c in ROWS)
    found, prepared = _prepared(tmp_path, monkeypatch, f"{path},delimiter={name}")
    assert found == EXPECTED
    assert [one.reason for one in prepared.rejections] == ["a row with the names of columns"]


def test_csv_of_texts(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text('id,text\n1,"He said ""no"", twice."\n')
    raw.run(tmp_path, [f"{path},split=train,content=text,language=en"])
    assert raw.texts(tmp_path / "out") == [("train", "en", "", 'He said "no", twice.')]


def test_translation_memories(tmp_path, monkeypatch):
    units = "".join(
        f'<tu><tuv xml:lang="EN-us"><seg>{c}</seg></tuv>'
        f'<tuv xml:lang="{a}"><seg>{b}</seg></tuv></tu>'
        for a, b, c in ROWS
    )
    (tmp_path / "memory.tmx").write_text(f'<tmx version="1.4"><body>{units}</body></tmx>')
    found, _ = _prepared(tmp_path, monkeypatch, tmp_path / "memory.tmx")
    assert found == EXPECTED


def keyed_files():
    """Returns name -> content of .properties files whose orders differ."""
    files = {"m.properties": "".join(f"{n}={row[2]}\n" for n, row in enumerate(ROWS)).encode()}
    for language in ("de", "fr"):
        rows = [(n, row[1]) for n, row in enumerate(ROWS) if row[0] == language]
        files[f"m_{language}.properties"] = "".join(f"{n}: {x}\n" for n, x in rows[::-1]).encode()
    return files


def test_messages_with_a_file_for_each_language(tmp_path, monkeypatch):
    folder = tmp_path / "l10n"
    folder.mkdir()
    for name, content in keyed_files().items():
        (folder / name).write_bytes(content)
    found, prepared = _prepared(tmp_path, monkeypatch, f"{folder},format=properties")
    assert found == EXPECTED
    assert len(prepared.sources[0].files) == 3
    archive(tmp_path / "l10n.zip", {f"a/{k}": v for k, v in keyed_files().items()})
    raw.run(tmp_path, [f"{tmp_path}/l10n.zip/a/*.properties,split=train"], output="zipped")
    assert raw.texts(tmp_path / "zipped") == EXPECTED


def test_what_macos_adds_to_an_archive_is_no_content(tmp_path):
    text = "".join("\t".join(row) + "\n" for row in ROWS)
    half = text.index("\n", len(text) // 2) + 1
    noise = {"__MACOSX/._a.tsv": b"\0\5\x16\7", "__MACOSX/b/._c.tsv": b"\0\5\x16\7"}
    files = {"a.tsv": text[:half].encode(), "b/c.tsv": text[half:].encode(), **noise}
    archive(tmp_path / "own.zip", files)
    raw.run(tmp_path, [f"{tmp_path}/own.zip/**/*.tsv,split=train"], output="zipped")
    assert raw.texts(tmp_path / "zipped") == EXPECTED
    assert archives.glob(f"{tmp_path}/own.zip", "__MACOSX/*") == [
        f"{tmp_path}/own.zip/{name}" for name in noise
    ]


def test_translations_of_qt_programs(tmp_path, monkeypatch):
    for language in ("de", "fr"):
        messages = "".join(
            f"<message><source>{c}</source><translation>{b}</translation></message>"
            for a, b, c in ROWS
            if a == language
        )
        text = f'<TS language="{language}"><context>{messages}</context></TS>'
        (tmp_path / f"app_{language}.ts").write_text(text)
    found, _ = _prepared(tmp_path, monkeypatch, f"{tmp_path},format=qt,name=app")
    assert found == EXPECTED


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_moses_pairs(tmp_path, monkeypatch, suffix):
    write = gzip.compress if suffix else bytes
    for language in ("de", "fr"):
        pairs = [row for row in ROWS if row[0] == language]
        prefix = tmp_path / f"{language}-en"
        prefix.mkdir()
        for code, column in ((language, 1), ("en", 2)):
            content = "".join(f"{row[column]}\n" for row in pairs).encode()
            (prefix / f"train.{code}{suffix}").write_bytes(write(content))
    found, prepared = _prepared(tmp_path, monkeypatch, f"{tmp_path}/*-en/train,format=moses")
    assert found == EXPECTED
    assert [len(source.files) for source in prepared.sources] == [4]


def archive(path, files):
    """Writes an archive by the end of its name."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as found:
            for name, content in files.items():
                found.writestr(name, content)
        return
    with tarfile.open(path, "w:gz") as found:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            found.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("name", ["corpus.zip", "corpus.tar.gz"])
def test_members_of_archives(tmp_path, monkeypatch, name):
    lines = ["\t".join(row) + "\n" for row in ROWS]
    content = "".join(lines[1:]).encode()
    files = {"a/x.tsv.gz": gzip.compress(lines[0].encode()), "a/y.tsv": content, "b.tsv": b"no"}
    archive(tmp_path / name, files)
    found, prepared = _prepared(
        tmp_path, monkeypatch, f"{tmp_path}/{name}/a/y.tsv", f"{tmp_path}/{name}/a/*.gz,format=tsv"
    )
    assert found == EXPECTED
    assert prepared.sources[0].files[0].bytes == len(content)
    with pytest.raises(ValueError, match=f"there is no such file in .*{name}"):
        raw.run(tmp_path, [f"{tmp_path}/{name}/c/*.tsv"], output="other")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{name} cannot be read as an archive"):
        raw.run(tmp_path, [f"{tmp_path}/{name}/a/*.tsv"], output="other")


def test_pairs_in_an_archive_of_opus(tmp_path, monkeypatch):
    pairs = [row for row in ROWS if row[0] == "de"]
    sides = {"de": [row[1] for row in pairs], "en": [row[2] for row in pairs]}
    sides |= {"ids": ["x"] * len(pairs)}
    files = {f"Corp.de-en.{end}": "\n".join(lines).encode() for end, lines in sides.items()}
    archive(tmp_path / "de-en.txt.zip", files | {"README": b"about"})
    source = f"{tmp_path}/de-en.txt.zip/Corp.de-en,format=moses"
    assert _prepared(tmp_path, monkeypatch, source)[0] == sorted(("train", *row) for row in pairs)
    with pytest.raises(ValueError, match=r"name the files in the archive, as in .*zip/\*\.tsv, or"):
        survey.Source.parse(f"{tmp_path}/de-en.txt.zip")


def test_an_opus_folder(tmp_path, monkeypatch):
    pairs = [row for row in ROWS if row[0] == "de"]
    sides = {"de": [row[1] for row in pairs], "en": [row[2] for row in pairs]}
    sides |= {"ids": ["x"] * len(pairs), "fr": ["y"] * len(pairs)}
    for ending, lines in sides.items():
        (tmp_path / f"Corp.de-en.{ending}").write_text("".join(f"{line}\n" for line in lines))
    found, prepared = _prepared(tmp_path, monkeypatch, f"{tmp_path}/Corp.de-en,format=moses")
    assert found == sorted(("train", *row) for row in pairs)
    assert [note.partition(" ")[0][-4:] for note in prepared.file_notes] == ["n.fr", ".ids"]
    assert preparation.notes(prepared)[:2] == prepared.file_notes
    # What is prepared already is told of in the same way.
    assert _prepared(tmp_path, monkeypatch, f"{tmp_path}/Corp.de-en,format=moses")[1] == prepared


def test_the_language_of_a_source_chooses_moses_pairs_and_names_that_of_rows(tmp_path, monkeypatch):
    pairs = [row for row in ROWS if row[0] == "de"]
    for ending, column in (("de", 1), ("en", 2), ("fr", 1)):
        content = "".join(f"{row[column]}\n" for row in pairs)
        (tmp_path / f"train.{ending}").write_text(content)
    source = f"{tmp_path}/train,format=moses,language=de"
    found, prepared = _prepared(tmp_path, monkeypatch, source)
    assert found == sorted(("train", *row) for row in pairs) and not prepared.file_notes
    path = raw.write_tsv(tmp_path / "two.tsv", [("source", "target"), *(row[1:] for row in pairs)])
    _, prepared = raw.run(tmp_path, [f"{path},split=train,language=de"], output="other")
    assert raw.texts(tmp_path / "other") == found
    assert [one.reason for one in prepared.rejections] == ["a row with the names of columns"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.tsv,document=line", "document=line has no effect on format=tsv; it applies to text"),
        (
            "a.tsv,target_language=de",
            "has no effect on format=tsv; it applies to moses and gettext and tmx and xliff",
        ),
        ("a,format=moses,source_field=x", "source_field=x has no effect on format=moses"),
    ],
)
def test_fields_that_have_no_effect_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        survey.Source.parse(source)


def test_gettext_catalogs(tmp_path, monkeypatch):
    for language in ("de", "fr"):
        folder = tmp_path / "locale" / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        entries = (f'msgid "{c}"\nmsgstr "{b}"\n' for a, b, c in ROWS if a == language)
        (folder / "messages.po").write_text(
            'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n' + "\n".join(entries)
        )
    found, prepared = _prepared(tmp_path, monkeypatch, tmp_path / "locale")
    assert found == EXPECTED
    assert prepared.sources[0].name == "locale"


def test_text(tmp_path, monkeypatch):
    path = tmp_path / "books.txt"
    paragraphs = [f"{row[1]}\n{row[2]}" for row in ROWS]
    path.write_text("\n\n".join(paragraphs) + "\n")
    found, prepared = _prepared(tmp_path, monkeypatch, f"{path},language=de")
    assert found == sorted(("train", "de", "", text) for text in paragraphs)
    assert prepared.content == "text"
    hint = "A text without empty lines is one row; document=line makes each line a row."
    assert hint not in preparation.notes(prepared)
    path.write_text("\n".join(paragraphs) + "\n")
    assert hint in preparation.notes(raw.run(tmp_path, [str(path)], output="one")[1])
    by_line = raw.run(tmp_path, [f"{path},document=line"], output="lines")[1]
    assert hint not in preparation.notes(by_line)
    with pytest.raises(ValueError, match="is text and .* sentence pairs; prepare them one by one"):
        raw.run(tmp_path, [str(path), f"{path},format=tsv"], output="other")


def test_parts_of_text_are_cut_between_paragraphs(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "PART_LINES", 7)
    monkeypatch.setattr(survey, "_BLOCK", 64)
    path = tmp_path / "books.txt"
    lines = [f"line {number}" if number % 4 else "" for number in range(1, 100)]
    path.write_text("\n".join(lines))
    found = survey.survey(str(path), survey.PARAGRAPHS)
    content = path.read_bytes()
    assert found.lines == len(lines)
    assert [cut.line for cut in found.cuts] == [1, *range(9, 99, 8)]
    for cut in found.cuts[1:]:
        assert content[: cut.offset].endswith(b"\n\n")
        assert content[: cut.offset].count(b"\n") == cut.line - 1
    by_line = survey.survey(str(path), survey.LINES)
    assert [cut.line for cut in by_line.cuts] == list(range(1, 100, 7))
    assert all(content[: cut.offset].count(b"\n") == cut.line - 1 for cut in by_line.cuts)
