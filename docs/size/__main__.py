"""Counts the code, and writes the tables of docs/size/table.md.

    python -m docs.size

counts files and lines of each folder and of the heart and its wings, and the imports between them.
It trains translation.quickstart for two steps in a process of its own, which takes a minute, and
counts the files that it executes.
"""

from __future__ import annotations

import argparse
import pathlib

import lingvo_gshard
from docs.size.count import Size, executed_by_a_step, folders
from docs.size.house import HEART, WINGS, House

PAGE = pathlib.Path(__file__).parent / "table.md"
BEGIN, END = "<!-- size: python -m docs.size -->", "<!-- end of size -->"


def table(sizes: list[Size]) -> str:
    """Returns sizes as a table in Markdown."""
    rows = ["| | files | lines | median file |", "|---|---|---|---|"]
    rows += [f"| {s.name} | {s.files:,} | {s.lines:,} | {s.median:,} |" for s in sizes]
    return "\n".join(rows)


def rooms_table(house: House) -> str:
    """Returns the heart and its wings as a table in Markdown."""
    rows = ["| | files | lines | names of the heart |", "|---|---|---|---|"]
    for size in house.sizes():
        names = "" if size.name == HEART else f"{_names_taken(house, size.name):,} "
        rows.append(f"| {size.name.replace('_', ' ')} | {size.files:,} | {size.lines:,} | {names}|")
    rows += ["", _in_words(house)]
    return "\n".join(rows)


def _in_words(house: House) -> str:
    """Returns a sentence on the imports between the heart and its wings."""
    return (
        f"The heart imports its wings in {len(house.breaches):,} places. They import "
        f"{_names_taken(house):,} of its names; its public modules offer {len(house.offered):,}."
    )


def _names_taken(house: House, wing: str = "") -> int:
    """Returns how many names of the heart a wing imports; by default all wings."""
    return len({(i.target, i.name) for i in house.taken(wing)})


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
    house = House(package, WINGS.read_text(encoding="utf-8"))
    parts = (rooms_table(house), table(executed_by_a_step(package)), table(folders(package)))
    tables = "\n\n".join(parts)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables)


if __name__ == "__main__":
    main()
