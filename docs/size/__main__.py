"""Counts the code, and writes the table of docs/architecture.md.

    python -m docs.size

counts files and lines of each folder, trains translation.quickstart for two steps in a process of
its own, which takes a minute, and counts the files that it executes.
"""

from __future__ import annotations

import argparse
import pathlib

import lingvo_gshard
from docs.size.count import Size, executed_by_a_step, folders

PAGE = pathlib.Path(__file__).parents[1] / "architecture.md"
BEGIN, END = "<!-- size: python -m docs.size -->", "<!-- end of size -->"


def table(sizes: list[Size]) -> str:
    """Returns sizes as a table in Markdown."""
    rows = ["| | files | lines | median file |", "|---|---|---|---|"]
    rows += [f"| {s.name} | {s.files:,} | {s.lines:,} | {s.median:,} |" for s in sizes]
    return "\n".join(rows)


def with_tables(text: str, tables: str) -> str:
    """Returns a page with new tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    """Counts, and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.size",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    package = pathlib.Path(lingvo_gshard.__file__).parent
    tables = f"{table(folders(package))}\n\n{table(executed_by_a_step(package))}"
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables)


if __name__ == "__main__":
    main()
