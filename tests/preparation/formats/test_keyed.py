"""Tests .arb, .properties and .sgm files, which are paired with the file of their targets."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

from lingvo_gshard.wings.preparation.formats import keyed, units


def read(reader_class, path, **values):
    """Returns the rows of files without their place, and the reader."""
    reader = reader_class.params().set(train=(str(path),), test=(str(path),), **values)
    reader = reader.instantiate()
    return [row[:3] for row in reader.rows("train")], reader


ENGLISH_ARB = {
    "@@locale": "en",
    "hello": "Hello, {name}!",
    "@hello": {"description": "A greeting.", "placeholders": {"name": {}}},
    "files": "{count, plural, =1{One file} other{{count} files}}",
    "bye": "Good bye",
}
GERMAN_ARB = {
    "@@locale": "de",
    "hello": "Hallo, {name}!",
    "files": "{count, plural, =1{Eine Datei} other{{count} Dateien}}",
    "alone": "Allein",
}


@pytest.fixture
def arb(tmp_path):
    """Makes a folder of .arb files and returns it."""
    folder = tmp_path / "l10n"
    folder.mkdir()
    for language, texts in (("en", ENGLISH_ARB), ("de", GERMAN_ARB), ("zh_Hant", {"bye": "再見"})):
        path = folder / f"app_{language}.arb"
        path.write_text(json.dumps(texts, indent=2, ensure_ascii=False), "utf-8")
    return folder


def test_arb_files_are_paired_with_the_one_of_the_target_language(arb):
    rows, reader = read(keyed.ArbReader, arb)
    expected = [("de", "Hallo, {name}!", "Hello, {name}!"), ("zh_Hant", "再見", "Good bye")]
    assert rows == expected
    assert reader.left_out == {keyed.BRANCHES: 1, units.NO_TARGET: 1}
    assert reader.examples[units.NO_TARGET].endswith("app_de.arb:5: it has de")
    assert read(keyed.ArbReader, arb / "app_*.arb")[0] == expected
    assert read(keyed.ArbReader, arb / "app_de.arb")[0] == expected[:1]
    assert read(keyed.ArbReader, arb, language="zh")[0] == expected[1:]
    assert read(keyed.ArbReader, arb, target_language="de")[0] == [
        ("en", "Hello, {name}!", "Hallo, {name}!")
    ]


def test_a_file_without_targets_is_refused(arb):
    with pytest.raises(ValueError, match="app_en.arb: it gives no rows: its name should end in"):
        read(keyed.ArbReader, arb / "app_en.arb")
    with pytest.raises(ValueError, match="there is no file of its targets: .* 'fr' was expected"):
        read(keyed.ArbReader, arb, target_language="fr")
    with pytest.raises(ValueError, match="app_fr.arb: no such file"):
        read(keyed.ArbReader, arb / "app_fr.arb")
    (arb / "app_de.arb").write_text("[1, 2]")
    with pytest.raises(ValueError, match="app_de.arb:0: the file is no .arb: expected an object"):
        read(keyed.ArbReader, arb)


PROPERTIES = """\ufeff# A comment, continued? \\
! Another one
 menu.open = Open the \\
    file
menu.close:Close
  spaced\\ key\\=x   value with = and \\t tab
title=\\u00dcbersicht \\uD83D\\ude00
empty=
last"""


def test_properties_are_read_as_java_reads_them():
    reader = keyed.PropertiesReader.params().set(train=("a",)).instantiate()
    found = reader.messages("a", PROPERTIES.encode())
    assert {key: message[:2] for key, message in found.items()} == {
        "menu.open": (3, "Open the file"),
        "menu.close": (5, "Close"),
        "spaced key=x": (6, "value with = and \t tab"),
        "title": (7, "Übersicht 😀"),
        "empty": (8, ""),
        "last": (9, ""),
    }
    # Java reads ISO-8859-1 where a file is no UTF-8.
    assert reader.messages("a", "a=ü".encode("latin-1"))["a"].text == "ü"
    with pytest.raises(ValueError, match="line 2"):
        reader.messages("a", b"a=b\nc=\\u12")


def _stored(text):
    """Returns a text as java.util.Properties.store writes a key or a value."""
    pieces = []
    for unit in memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H").tolist():
        char = chr(unit)
        if char in "\t\n\r\f":
            pieces.append("\\" + {"\t": "t", "\n": "n", "\r": "r", "\f": "f"}[char])
        elif char in " =:#!\\":
            pieces.append(f"\\{char}")
        else:
            pieces.append(char if 0x20 <= unit <= 0x7E else f"\\u{unit:04X}")
    return "".join(pieces)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.text(max_size=12), max_size=4))
def test_what_java_stores_comes_back(texts):
    reader = keyed.PropertiesReader.params().set(train=("a",)).instantiate()
    lines = "".join(f"{_stored(key)}={_stored(value)}\n" for key, value in texts.items())
    found = reader.messages("a", lines.encode("iso-8859-1"))
    assert {key: message.text for key, message in found.items()} == texts


def test_a_file_of_properties_without_a_language_has_the_targets(tmp_path):
    (tmp_path / "m.properties").write_text("a=one\nb=two\n")
    (tmp_path / "m_de.properties").write_text("b=zwei\na=eins\n")
    (tmp_path / "m_qqq.properties").write_text("a=shown at the top\n")
    rows, _ = read(keyed.PropertiesReader, tmp_path)
    assert rows == [("de", "zwei", "two"), ("de", "eins", "one")]
    (tmp_path / "m_en.properties").write_text("a=One\n")
    assert read(keyed.PropertiesReader, tmp_path)[0] == [("de", "eins", "One")]


def sgm(kind, *segments):
    """Returns a file of WMT: two documents, whose segments have the same numbers."""
    half = len(segments) // 2
    documents = [
        f'<doc sysid="ref" docid="{name}" genre="news" origlang="de">\n<p>\n'
        + "".join(f'<seg id="{n}">{text}</seg>\n' for n, text in enumerate(part, start=1))
        + "</p>\n</doc>\n"
        for name, part in (("abc.1", segments[:half]), ("xyz.2", segments[half:]))
    ]
    return f'<{kind} setid="newstest" srclang="any">\n{"".join(documents)}</{kind}>\n'


def test_segments_of_wmt_are_paired_by_document_and_number(tmp_path):
    german = ["Das ist  gut.", "Müller & Söhne", "Ein Satz.", "Ende"]
    english = ["That is good.", "Müller & Sons", "A sentence.", "End"]
    source = tmp_path / "newstest2014-deen-src.de.sgm"
    source.write_text(sgm("srcset", *german), "utf-8")
    target = tmp_path / "newstest2014-deen-ref.en.sgm"
    target.write_text(sgm("refset", *english), "utf-8")
    # sacrebleu reads such files for its scores.
    peer = FakeSGMLDataset("newstest", data=[], description="", citation="", langpairs={})
    texts = []
    for path in (source, target):
        peer._convert_format(str(path), str(tmp_path / "plain"))
        texts.append((tmp_path / "plain").read_text("utf-8").splitlines())
    rows, _ = read(keyed.SgmReader, source)
    assert [row[1:] for row in rows] == list(zip(*texts, strict=True))
    assert [row[2] for row in rows] == english
    target.write_text(sgm("refset", *[text.replace("&", "&amp;") for text in english]), "utf-8")
    assert read(keyed.SgmReader, tmp_path / "*-src.*.sgm")[0] == rows
    assert read(keyed.SgmReader, tmp_path / "*.sgm")[0] == rows
