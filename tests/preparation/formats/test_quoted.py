"""Tests rows of fields in quotes, against the module csv of Python and by hand."""

import re

import pytest

from lingvo_gshard.wings.preparation.formats import quoted


def read(tmp_path, content, **values):
    """Returns the rows of a file without their place, and the reader."""
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode())
    reader = quoted.QuotedReader.params().set(train=(str(path),), test=(str(path),), **values)
    reader = reader.instantiate()
    return [(*row[:3], row.line) for row in reader.rows("train")], reader


def test_fields_have_quotes_line_ends_and_delimiters(tmp_path):
    content = 'de,"Er sagte ""Ja, gut""","He said ""yes, fine"""\r\nfr,"deux\nlignes",two\n'
    rows, _ = read(tmp_path, content)
    assert rows == [
        ("de", 'Er sagte "Ja, gut"', 'He said "yes, fine"', 1),
        ("fr", "deux\nlignes", "two", 2),
    ]


def test_columns_are_found_by_their_names(tmp_path):
    content = "id;english;german\n7;house;Haus\n"
    names = {"source_field": "german", "target_field": "english", "language": "de"}
    rows, reader = read(tmp_path, content, delimiter="semicolon", **names)
    assert rows == [("de", "Haus", "house", 2)]
    assert reader.left_out == {"a row with the names of columns": 1}


def test_two_columns_have_a_language_of_their_own(tmp_path):
    content = 'src\ttgt\n"Haus"\thouse\n'
    rows, _ = read(tmp_path, content, delimiter="tab", language="de")
    assert rows == [("de", "Haus", "house", 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "de,Haus\n",
            r"a.csv:1: wrong number of columns: 2, expected 3 \(language, source, target\). Rows "
            "that name no language need language=CODE",
        ),
        (",Haus,house\n", "a.csv:1: no language code: Rows that name no language need language="),
        ('de,"Haus"x,house\n', "a.csv:1: quotes that do not fit: "),
        ('de,a,b\nde,"Haus,house\n', "a.csv:2: quotes that do not fit: unexpected end of data"),
    ],
)
def test_bad_rows_are_refused_or_skipped(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)
    rows, reader = read(tmp_path, content + "fr,oui,yes\n", on_bad_row="skip")
    assert sum(reader.left_out.values()) == 1
    assert len(rows) == 1


def test_named_columns_without_a_language_need_one(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv:2: no language code: .* need language=CODE"):
        read(tmp_path, "source,target\nHaus,house\n")


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"source_field": "germn"}, "source_field='germn' names no column. Did you mean 'german'?"),
        ({"target_field": "fr"}, "target_field='fr' names no column. Valid: english, german"),
        ({"language_field": "code"}, "language_field='code' names no column"),
    ],
)
def test_a_name_that_no_column_has_is_refused(tmp_path, names, message, on_bad_row):
    """Two columns in another order than the usual one would be taken for each other."""
    names = {"source_field": "german", "target_field": "english", "language": "de"} | names
    with pytest.raises(ValueError, match=rf"a\.csv:1: {re.escape(message)}"):
        read(tmp_path, "english,german\nhouse,Haus\n", on_bad_row=on_bad_row, **names)


def test_an_unknown_delimiter_is_refused():
    with pytest.raises(ValueError, match="delimiter is 'commas'; expected 'comma', 'tab' or"):
        quoted.QuotedReader.params().set(train=("a",), delimiter="commas")
