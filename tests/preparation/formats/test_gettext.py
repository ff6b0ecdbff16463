"""Tests GettextReader: languages by path or header, counts of unused entries, and errors."""

import polib
import pytest

from lingvo_gshard.wings.preparation.formats import gettext


def reader(path, **values):
    return gettext.GettextReader.params().set(train=str(path), test="x", **values).instantiate()


def catalog():
    po = polib.POFile()
    po.metadata = {"Content-Type": "text/plain; charset=UTF-8"}
    po.append(polib.POEntry(msgid="Open file", msgstr="Datei öffnen"))
    po.append(polib.POEntry(msgid="Close", msgstr="Schliessen", flags=["fuzzy"]))
    po.append(polib.POEntry(msgid="Save", msgstr=""))
    po.append(polib.POEntry(msgid="Old", msgstr="Alt", obsolete=True))
    po.append(
        polib.POEntry(
            msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "%d Datei", 1: "%d Dateien"}
        )
    )
    po.append(polib.POEntry(msgid="May", msgctxt="month", msgstr="Mai"))
    return po


PAIRS = {
    ("de", "Datei öffnen", "Open file"),
    ("de", "%d Datei", "%d file"),
    ("de", "%d Dateien", "%d files"),
    ("de", "Mai", "May"),
}


def test_po(tmp_path):
    path = tmp_path / "de.po"
    catalog().save(str(path))
    r = reader(path)
    rows = r.rows("train")
    assert {row[:3] for row in rows} == PAIRS
    assert r.left_out == {gettext.FUZZY: 1, gettext.UNTRANSLATED: 1, gettext.OBSOLETE: 1}
    lines = path.read_text().split("\n")
    for row in rows:
        assert row.file == str(path)
        assert row.target.split()[-1].rstrip("s") in "".join(lines[row.line - 1 : row.line + 2])


def test_mo(tmp_path):
    path = tmp_path / "de.mo"
    catalog().save_as_mofile(str(path))
    r = reader(path)
    assert {row[:3] for row in r.rows("train")} == PAIRS


@pytest.mark.parametrize(
    ("place", "language"),
    [
        ("de.mo/sv.po", "sv"),
        ("locale/pt_BR/LC_MESSAGES/django.po", "pt_BR"),
        ("po/sr@latin.po", "sr@latin"),
        ("po/ca/app.po", "ca"),
        ("locale/racv/LC_MESSAGES/app.po", "racv"),
    ],
)
def test_language_of_a_tree(tmp_path, place, language):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    catalog().save(str(path))
    assert {row.language for row in reader(tmp_path).rows("train")} == {language}


def test_language_of_the_header(tmp_path):
    po = catalog()
    po.metadata["Language"] = "nl"
    po.save(str(tmp_path / "app.po"))
    (tmp_path / "po" / "ca").mkdir(parents=True)
    po.save_as_mofile(str(tmp_path / "po" / "ca" / "app.mo"))
    assert {row.language for row in reader(tmp_path).rows("train")} == {"nl", "ca"}


def test_linked_catalogs_are_read_once(tmp_path):
    """As glibc's and Debian's folders link catalogs, of LC_TIME and of variants."""
    folder = tmp_path / "locale" / "de" / "LC_MESSAGES"
    for other in ("de/LC_TIME", "de_AT/LC_MESSAGES", "at/LC_MESSAGES"):
        (tmp_path / "locale" / other).mkdir(parents=True)
        (tmp_path / "locale" / other / "app.mo").symlink_to(folder / "app.mo")
    folder.mkdir()
    catalog().save_as_mofile(str(folder / "app.mo"))
    for pattern in (tmp_path, tmp_path / "**" / "*.mo"):
        r = reader(pattern)
        rows = r.rows("train")
        assert {row[:3] for row in rows} == PAIRS and len(rows) == len(PAIRS)
        assert {row.file for row in rows} == {str(folder / "app.mo")}
        assert len(r.file_notes) == 1 and ": 3 of 4 files are links to others" in r.file_notes[0]


def test_a_setting_names_the_language_of_catalogs_that_name_none(tmp_path):
    for name in ("messages", "nl"):
        catalog().save(str(tmp_path / f"{name}.po"))
    rows = reader(tmp_path, language="de").rows("train")
    assert {row.language for row in rows} == {"de", "nl"}


def test_catalogs_of_the_target_language_and_without_a_language(tmp_path):
    (tmp_path / "po").mkdir()
    catalog().save(str(tmp_path / "po" / "en_GB.po"))
    r = reader(tmp_path)
    assert r.rows("train") == []
    assert r.left_out == {gettext.TARGET_LANGUAGE: 6}
    catalog().save(str(tmp_path / "messages.po"))
    with pytest.raises(ValueError, match="messages.po:1: the catalog's language"):
        reader(tmp_path).rows("train")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'msgid "a"\nmsgstr "b"\nfoo bar\n', "de.po:3: damaged catalog"),
        (b'msgid "a"\nmsgstr "\xff"\n', "de.po:2: not UTF-8"),
        (b"", "de.mo:0: damaged catalog: the file is empty"),
        (b'msgid "a"\nmsgstr "b', "de.po:2: damaged catalog: a string without an end"),
        (b'msgid "a"\nmsgstr "b"\n\nmsgid "c"\n', "de.po:5: damaged catalog: it ends after"),
        (b'msgid "a"\nmsgstr "b\0"\n', "de.po:2: damaged catalog: NUL bytes"),
        (b"no catalog at all", "de.mo:0: damaged catalog"),
    ],
)
def test_damaged_catalogs(tmp_path, content, place):
    path = tmp_path / place.split(":")[0]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/{place}"):
        reader(path).rows("train")
    r = reader(path, on_bad_row="skip")
    assert r.rows("train") == []
    assert sum(r.left_out.values()) == 1


def test_wrong_encodings(tmp_path):
    po = catalog()
    po.metadata["Content-Type"] = "text/plain; charset=ISO-8859-1"
    po.encoding = "iso-8859-1"
    po.save(str(tmp_path / "de.po"))
    po.save_as_mofile(str(tmp_path / "de.mo"))
    for name in ("de.po", "de.mo"):
        assert {row[:3] for row in reader(tmp_path / name).rows("train")} == PAIRS
        content = (tmp_path / name).read_bytes().replace(b"ISO-8859-1", b"KLINGON-01")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}:0: damaged catalog: .*'KLINGON-01'"):
            reader(tmp_path / name).rows("train")


def test_missing_catalogs(tmp_path):
    with pytest.raises(ValueError, match=r"none\.po: no such file"):
        reader(tmp_path / "none.po", on_bad_row="skip").rows("train")
    with pytest.raises(ValueError, match=r"there is no \.po or \.mo file in this directory"):
        reader(tmp_path, on_bad_row="skip").rows("train")
