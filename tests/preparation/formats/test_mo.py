# tests: wings/preparation/formats/gettext.py
"""Tests the parser of .mo catalogs: both byte orders, and every kind of truncation."""

import gettext
import io
import struct

import pytest

from lingvo_gshard.wings.preparation.formats.gettext import DamagedCatalogError, parse

STRINGS = [
    (b"", b"Content-Type: text/plain; charset=UTF-8\nLanguage: de\n"),
    (b"Open", "Öffnen".encode()),
    (b"Save", b""),
    (b"file\0files", b"Datei\0Dateien"),
    (b"month\x04May", b"Mai"),
]


def catalog(order="<", revision=0):
    """Builds a catalog by the format's definition; its last string ends the file."""
    count, tables = len(STRINGS), 28
    begin = tables + 16 * count
    body, rows = b"", []
    for side in zip(*STRINGS, strict=True):
        for text in side:
            rows.append((len(text), begin + len(body)))
            body += text + b"\0"
    header = struct.pack(
        f"{order}7I", 0x950412DE, revision, count, tables, tables + 8 * count, 0, begin
    )
    return header + b"".join(struct.pack(f"{order}2I", *row) for row in rows) + body


@pytest.mark.parametrize("order", ["<", ">"])
def test_reads_what_the_standard_library_reads(order):
    content = catalog(order)
    headers, entries = parse(content)
    assert headers["Language"] == "de"
    assert [(one.linenum, one.msgid, one.msgid_plural, one.msgstr) for one in entries] == [
        (1, "Open", "", "Öffnen"),
        (2, "Save", "", ""),
        (3, "file", "files", "Datei\0Dateien"),
        (4, "May", "", "Mai"),
    ]
    forms = [one.msgstr_plural for one in entries]
    assert forms == [{}, {}, {0: "Datei", 1: "Dateien"}, {}]
    known = gettext.GNUTranslations(io.BytesIO(content))
    assert known.gettext("Open") == "Öffnen" and known.pgettext("month", "May") == "Mai"


@pytest.mark.parametrize("order", ["<", ">"])
def test_every_truncation_is_refused(order):
    content = catalog(order)
    for size in range(len(content)):
        with pytest.raises(DamagedCatalogError, match=r"truncated|empty|no \.mo file"):
            parse(content[:size])


def test_wrong_offsets_and_revisions_are_refused():
    content = bytearray(catalog())
    struct.pack_into("<I", content, 28 + 8, 3)
    with pytest.raises(DamagedCatalogError, match="message 2 of 5 does not end with a NUL"):
        parse(bytes(content))
    struct.pack_into("<I", content, 8, 0xFFFFFFFF)
    with pytest.raises(DamagedCatalogError, match="the table of messages ends at byte"):
        parse(bytes(content))
    with pytest.raises(DamagedCatalogError, match="unknown revision 7"):
        parse(catalog(revision=7 << 16))


def test_a_codec_that_is_no_character_set_is_refused():
    content = catalog().replace(b"charset=UTF-8\n", b"charset=hex  \n")
    with pytest.raises(DamagedCatalogError, match="character set 'hex' is unknown"):
        parse(content)


def test_strings_that_overlap_are_refused_before_they_fill_the_memory():
    """A thousand entries of a megabyte each, which is one and the same."""
    count, text = 1000, b"x" * 2**20 + b"\0"
    tables, begin = 28, 28 + 16 * count
    rows = struct.pack("<2I", 2**20, begin) * (2 * count)
    header = struct.pack("<7I", 0x950412DE, 0, count, tables, tables + 8 * count, 0, begin)
    with pytest.raises(DamagedCatalogError, match="its messages overlap"):
        parse(header + rows + text)
