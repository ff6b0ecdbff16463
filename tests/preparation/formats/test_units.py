"""Tests TMX, XLIFF and test sets of WMT: codes, states, several languages, and damaged files."""

import gzip

import pytest
from sacrebleu.dataset.wmt_xml import WMTXMLDataset

from lingvo_gshard.wings.preparation.formats import units

TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
<tu tuid="1"><prop type="x">no text</prop>
 <tuv xml:lang="en-US"><seg>Press <bpt i="1">&lt;b<sub>no</sub>&gt;</bpt>OK<ept
 i="1">x</ept> &amp; go</seg></tuv>
 <tuv xml:lang="de"><seg>Drücken Sie <hi>OK</hi></seg></tuv>
 <tuv xml:lang="fr"><seg><![CDATA[Appuyez < ici]]></seg></tuv>
</tu>
<tu><tuv xml:lang="de"><seg>nur deutsch</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>only English</seg></tuv></tu>
</body></tmx>
"""
XLIFF_1 = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file source-language="en" target-language="pt-BR" original="a"><body>
<trans-unit id="1"><source>Open <g id="1">the <x id="2"/>file</g></source>
 <seg-source><mrk mtype="seg">no</mrk></seg-source>
 <target state="translated">Abra o arquivo</target>
 <alt-trans><source>other</source><target>outro</target></alt-trans></trans-unit>
<trans-unit id="2"><source>Close</source>
 <target state="needs-translation">Close</target></trans-unit>
<trans-unit id="3"><source>Save</source></trans-unit>
</body></file>
<file source-language="de" target-language="en"><body>
<trans-unit id="4"><source>Haus</source><target>house</target></trans-unit>
</body></file></xliff>
"""
XLIFF_2 = """<xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0"
 srcLang="en" trgLang="fr">
<file id="f"><unit id="1"><notes><note>no text</note></notes>
<segment state="final"><source>A <pc id="1">bold</pc> word</source>
<target>Un mot <pc id="1">gras</pc>
</target></segment>
<ignorable><source> </source></ignorable>
<segment state="initial"><source>New</source><target>Neuf</target></segment>
</unit></file></xliff>
"""
WMT = """<?xml version='1.0' encoding='utf-8'?>
<dataset id="newstest2021.de-en">
 <collection id="general">
  <doc origlang="de" id="one">
   <src lang="de"><p><seg id="1">Ein Haus &amp; ein Hof</seg> <seg id="2">Guten
 Tag</seg></p><p><seg id="3">Ohne Antwort</seg></p></src>
   <ref lang="en" translator="B"><p><seg id="2">Good day</seg></p></ref>
   <ref lang="en" translator="A"><p><seg id="1">A house &amp; a yard</seg>
    <seg id="2">Hello</seg></p></ref>
   <hyp system="best" language="en"><p><seg id="1">House</seg><seg id="2">Day</seg>
    <seg id="3">No answer</seg></p></hyp>
  </doc>
  <doc origlang="de" id="two"><src lang="de"><seg id="1">Ende</seg></src>
   <ref lang="en" translator="A"><seg id="1">The end</seg></ref>
   <hyp system="best" language="en"><seg id="1">End</seg></hyp></doc>
  <doc origlang="de" id="suite" testsuite="idioms"><src lang="de"><seg id="1">x</seg></src>
   <ref lang="en" translator="A"><seg id="1">y</seg></ref></doc>
 </collection>
</dataset>
"""


def read(tmp_path, content, name="a.tmx", **values):
    """Returns the rows of a file without their place, and the reader."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = units.WmtReader if name.endswith(".xml") else units.UnitReader
    reader = kind.params().set(train=(str(path),), test=(str(path),), **values)
    reader = reader.instantiate()
    return [row[:3] for row in reader.rows("train")], reader


def test_a_unit_of_tmx_gives_a_row_for_each_language(tmp_path):
    rows, reader = read(tmp_path, TMX)
    english = "Press OK & go"
    assert rows == [("de", "Drücken Sie OK", english), ("fr", "Appuyez < ici", english)]
    assert reader.left_out == {units.NO_TARGET: 1, units.NO_SOURCE: 1}
    assert reader.examples[units.NO_TARGET].endswith("a.tmx:10: it has de")
    assert reader.rows("train")[0].line == 4
    rows, _ = read(tmp_path, TMX, language="de", target_language="fr")
    assert rows == [("de", "Drücken Sie OK", "Appuyez < ici")]


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_blocks_may_end_anywhere(tmp_path, monkeypatch, size):
    expected, _ = read(tmp_path, TMX)
    monkeypatch.setattr("lingvo_gshard.data.sources.readers._BLOCK", size)
    assert read(tmp_path, TMX)[0] == expected
    assert read(tmp_path, TMX.replace("UTF-8", "UTF-16").encode("utf-16"))[0] == expected


def test_xliff_1_is_read_in_both_directions(tmp_path):
    rows, reader = read(tmp_path, XLIFF_1, "a.xlf")
    assert rows == [("pt-BR", "Abra o arquivo", "Open the file"), ("de", "Haus", "house")]
    assert reader.left_out == {units.UNFINISHED: 1, units.NO_SOURCE: 1}


def test_xliff_2_has_segments(tmp_path):
    rows, reader = read(tmp_path, gzip.compress(XLIFF_2.encode()), "a.xlf.gz")
    assert rows == [("fr", "Un mot gras", "A bold word")]
    assert reader.left_out == {units.UNFINISHED: 1}


BOMB = '<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx><body>&b;</body></tmx>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TMX[:400], "a.tmx:8: the file is no TMX or XLIFF: "),
        ("de\tHaus\thouse\n", "a.tmx:1: the file is no TMX or XLIFF: syntax error"),
        (BOMB, "a.tmx:1: the file is no TMX or XLIFF: it defines the entity a, which is not"),
    ],
    ids=["cut off", "another format", "entities"],
)
def test_damaged_files_are_refused_or_skipped(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)
    _, reader = read(tmp_path, content, on_bad_row="skip")
    assert reader.left_out["the file is no TMX or XLIFF"] == 1


def test_a_test_set_of_wmt_is_read_as_sacrebleu_reads_it(tmp_path):
    rows, reader = read(tmp_path, WMT, "newstest2021.de-en.all.xml")
    assert reader.left_out[units.TEST_SUITE] == reader.left_out[units.NO_TARGET] == 1
    found = WMTXMLDataset._unwrap_wmt21_or_later(tmp_path / "newstest2021.de-en.all.xml")
    assert [source for _, source, _ in rows] == found["src"]
    # The first reference that has a segment: B has the second one alone.
    references = zip(found["ref:B"], found["ref:A"], strict=True)
    assert [target for _, _, target in rows] == [b or a for b, a in references]
    assert {language for language, _, _ in rows} == {"de"}
    reversed_rows, _ = read(tmp_path, WMT, "newstest2021.de-en.all.xml", target_language="de")
    assert reversed_rows == [("en", target, source) for _, source, target in rows]


def test_other_xml_is_no_test_set_of_wmt(tmp_path):
    message = "a.xml:1: the file is no test set of WMT: it begins with <cesAlign>; <dataset> was"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, '<cesAlign version="1.0"><linkGrp/></cesAlign>', "a.xml")


def test_the_header_of_a_catalog_that_po2xliff_converted_is_no_row(tmp_path):
    content = (
        '<xliff version="1.1" xmlns="urn:oasis:names:tc:xliff:document:1.1">'
        '<file datatype="po" source-language="en" target-language="de"><body>'
        '<trans-unit id="1" restype="x-gettext-domain-header"><source>MIME-Version: 1.0</source>'
        "<target>MIME-Version: 1.0</target></trans-unit>"
        '<trans-unit id="2"><source>Open</source><target>Offen</target></trans-unit>'
        "</body></file></xliff>"
    )
    rows, reader = read(tmp_path, content, "a.xlf")
    assert rows == [("de", "Offen", "Open")] and not reader.left_out
