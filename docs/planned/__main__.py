"""Plans published models on machines and writes docs/planned_and_published.md.

    python -m docs.planned

writes the page from docs/planned/results.jsonl, the cells that were planned so far. A test holds
that the page is up to date.

    python -m docs.planned --machine=v5p --model=llama-3.1-8b

plans the cells of a machine and a model that are missing first; either may be `all`. A cell takes
about a minute on two cores. Cells are kept as they are made, so that the command goes on where it
was interrupted. --again plans cells anew.
"""

from __future__ import annotations

import argparse

from docs.planned import cells
from docs.planned.choices import ALL, chosen
from docs.planned.machines import MACHINES
from docs.planned.models import MODELS
from docs.planned.published import page, rows


def main() -> None:
    """Plans what the command line asks for, and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.planned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machine", default="", help="a machine, such as v5p, or all")
    parser.add_argument("--model", default=ALL, help="a model, such as llama-3.1-8b, or all")
    parser.add_argument("--work", default=ALL, help="such as training, or all")
    parser.add_argument("--again", action="store_true", help="plan cells anew")
    given = parser.parse_args()
    if given.machine:
        _make(given)
    page.write(rows.load())


def _make(given: argparse.Namespace) -> None:
    machines = chosen("machine", given.machine, {each.key: each for each in MACHINES})
    planned = {each.key: each for each in MODELS if each.is_planned}
    for machine in machines:
        for model in chosen("model", given.model, planned):
            for work in chosen("work", given.work, {work: work for work in cells.WORKS}):
                if given.again or (model.key, machine.key, work) not in cells.load():
                    cell = cells.make(model, machine, work)
                    cells.save((cells.load() | {cell.key: cell}).values())


if __name__ == "__main__":
    main()
