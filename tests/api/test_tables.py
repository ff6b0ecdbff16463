"""Tests that tables keep their cells in terminals of any width."""

import io

import pytest
import rich.console
import rich.table

from lingvo_gshard.api import tables

CELLS = ("pt_BR", "1,284", "43.81", "20.07")


def printed(columns: str) -> str:
    """Returns a table as a terminal of so many columns gets it."""
    table = rich.table.Table("language", "rows")
    for heading in ("chrF", "BLEU"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(*CELLS)
    file = io.StringIO()
    environment = {"COLUMNS": columns, "TERM": "xterm"}
    tables.print_table(rich.console.Console(file=file, _environ=environment), table)
    return file.getvalue()


@pytest.mark.parametrize("columns", ["0", "1", "20", "-5", "many", ""])
def test_a_narrow_terminal_cuts_no_cell(columns):
    assert printed(columns) == printed("80")
    assert all(cell in printed(columns) for cell in ("language", *CELLS))


def test_long_text_is_wrapped_to_the_terminal():
    table = rich.table.Table("reason", "rows")
    table.add_row("a text that is long and has many words " * 5, "12")
    file = io.StringIO()
    tables.print_table(rich.console.Console(file=file, width=60), table)
    assert max(map(len, file.getvalue().splitlines())) <= 60


def test_a_row_that_no_terminal_line_holds_has_a_line_for_each_cell():
    table = rich.table.Table("layer", rich.table.Column("kernel", no_wrap=True), "bytes", "")
    table.add_row("encoder", "a_name_of_forty_letters_" * 2, "1,024", "")
    file = io.StringIO()
    tables.print_table(rich.console.Console(file=file, width=60), table)
    cells = ["encoder", f"  kernel: {'a_name_of_forty_letters_' * 2}", "  bytes: 1,024"]
    assert [line.rstrip() for line in file.getvalue().splitlines()] == cells


def test_a_table_of_many_columns_loses_its_frame():
    heads = ("language", "rows", "chrF", "BLEU", "shuffled\nchrF", "shuffled\nBLEU")
    table = rich.table.Table(*heads, "copied\nchrF", "copied\nBLEU", "perplexity")
    table.add_row("pt_BR", "1,284", "43.81", "20.07", "9.6", "1.2", "27.3", "8.1", "966.5")
    file = io.StringIO()
    tables.print_table(rich.console.Console(file=file, width=80), table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80 and lines[-1].split() == list(table_cells(table))


def table_cells(table):
    """Returns the cells of a table's one row."""
    return [next(iter(column.cells)) for column in table.columns]


def test_words_are_not_split_where_columns_share_few_places():
    words = ("collective-permute", "configuration", "rematerialization")
    table = rich.table.Table("a", "b", "c")
    table.add_row(*(f"{word} and some more words around it" for word in words))
    file = io.StringIO()
    tables.print_table(rich.console.Console(file=file, width=64), table)
    assert all(word in file.getvalue() for word in words)
    assert max(map(len, file.getvalue().splitlines())) <= 64
