"""Tests .ts and .qm files of Qt against a file that Qt's own lrelease 5.15.8 made."""

import base64
import gzip
import zlib

import pytest

from lingvo_gshard.wings.preparation.formats import gettext, qt, units

TS = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="de_DE" sourcelanguage="en">
<context><name>Main</name>
<message><location filename="a.cpp" line="1"/><source>Open &amp;file</source>
 <translation>Datei &amp;öffnen</translation></message>
<message numerus="yes"><source>%n file(s)</source><translation><numerusform>%n Datei</numerusform>
 <numerusform>%n Dateien</numerusform></translation></message>
<message><source>Save</source><comment>short</comment><translation variants="yes">
 <lengthvariant>Speichern unter</lengthvariant><lengthvariant>Sp.</lengthvariant></translation>
</message>
<message><source>Close</source><translation type="unfinished">Zu</translation></message>
<message><source>Quit</source><translation type="vanished">Ende</translation></message>
<message><source>Tab<byte value="x1b"/></source><translation>Reiter</translation></message>
</context></TS>
"""
# What lrelease makes of it. It takes unfinished translations, too.
QM = zlib.decompress(
    base64.b85decode(
        "c-phsks@*G{hX<16=n7(EZlo{IRgU&Yf5Uoi>nimrNO{D<0z0`&A__c8c4rm&|LKtNarzlnN0=KKD-S3ErB#cC"
        "IbVbI5UtTz@Q40RbX&oNMtBsNM*<b35uW#0&yM(NFN&zbE)Pjq-Ex$Y7}d-1Gy}|iJ5tfAZ;uRQ4FPUWvtFQ`N"
        "gTIDx{E%RA5kJ_{NY1gn6jO`xm6<DX4*LK-H|q5X?{j)|$+a0i=t-ZY%|oC1Bnhu)H4JAeP|7GBhK27=pkCfHf"
        "c#h9o9QBNTQ3Sxk(K03KXE_5"
    )
)
ROWS = {
    ("de_DE", "Datei &öffnen", "Open &file"),
    ("de_DE", "%n Dateien", "%n file(s)"),
    ("de_DE", "Speichern unter", "Save"),
    ("de_DE", "Reiter", "Tab\x1b"),
}


def read(tmp_path, content, name, **values):
    """Returns the rows of a file without their place, and the reader."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reader = qt.QtReader.params().set(train=(str(path),), test=(str(path),), **values)
    reader = reader.instantiate()
    return {row[:3] for row in reader.rows("train")}, reader


def test_ts_files_say_which_translations_are_finished(tmp_path):
    rows, reader = read(tmp_path, TS, "app_de.ts")
    assert rows == ROWS
    assert reader.left_out == {units.UNFINISHED: 1, gettext.OBSOLETE: 1}
    assert reader.rows("train")[1].line == 7
    zipped, _ = read(tmp_path, gzip.compress(TS.encode()), "app_de.ts.gz")
    assert zipped == ROWS


def test_qm_files_are_what_lrelease_makes_of_ts_files(tmp_path):
    rows, _ = read(tmp_path, QM, "app.qm")
    assert rows == ROWS | {("de_DE", "Zu", "Close")}


@pytest.mark.parametrize(("name", "content"), [("app.ts", TS), ("app.qm", QM)])
def test_either_side_may_be_the_target(tmp_path, name, content):
    rows, _ = read(tmp_path, content, name, target_language="de")
    expected = {("en", target, source) for _, source, target in ROWS}
    assert rows - {("en", "Close", "Zu")} == expected


def test_the_language_of_a_qm_file_is_in_it_or_in_its_name(tmp_path):
    # Files of Qt 4 name no language. Unknown parts of a file are passed over.
    unnamed = QM.replace(b"\xa7\x00\x00\x00\x05de_DE", b"\xa8\x00\x00\x00\x05de_DE")
    assert len(read(tmp_path, unnamed, "app_sr@latin.qm")[0]) == 5
    with pytest.raises(ValueError, match="app.qm:0: neither the file nor its name says its lang"):
        read(tmp_path, unnamed, "app.qm")


def test_a_directory_of_files_whose_names_have_the_language(tmp_path):
    plain = TS.replace(' language="de_DE" sourcelanguage="en"', "")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "app_pt_BR.ts").write_text(plain, "utf-8")
    (tmp_path / "other.txt").write_text("no translation")
    reader = qt.QtReader.params().set(train=(str(tmp_path),), test=(str(tmp_path),)).instantiate()
    assert {row.language for row in reader.rows("train")} == {"pt_BR"}
    (tmp_path / "deep" / "app_pt_BR.ts").unlink()
    with pytest.raises(ValueError, match=r"there is no \.ts or \.qm file in this directory"):
        reader.rows("test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "app.qm:0: damaged .qm file: the file is empty"),
        (b"GIF89a", "app.qm:0: damaged .qm file: it starts with b'GIF89a'"),
        (QM[:200], "app.qm:0: damaged .qm file: truncated: a part ends at byte"),
        (QM.replace(b"\x06\x00\x00\x00\x04Save", b"\x06\x7f\x00\x00\x04Save"), "past the end of"),
        (QM.replace(b"\x06\x00\x00\x00\x04Save", b"\x2a\x00\x00\x00\x04Save"), "unknown field 42"),
    ],
)
def test_damaged_files_are_refused_or_skipped(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content, "app.qm")
    rows, reader = read(tmp_path, content, "app.qm", on_bad_row="skip")
    assert not rows and sum(reader.left_out.values()) == 1


def test_every_cut_and_every_changed_byte_of_a_qm_file_is_read_or_refused(tmp_path):
    for place in range(len(QM)):
        for content in (QM[:place], QM[:place] + bytes([QM[place] ^ 0x5A]) + QM[place + 1 :]):
            try:
                qt.parse_qm(content)
            except qt.DamagedQmError:
                continue
