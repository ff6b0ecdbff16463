"""Plans trainings that others measured and writes docs/planned_and_published.md.

    python -m docs.planned.published

writes the page from docs/planned/published/results.jsonl. A test holds that it is up to date.

    python -m docs.planned.published --training="torchtitan llama-3.1-8b 8"

plans a training first, or with `all` those that are missing. --again plans them anew. A training
takes one to five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os

from docs.planned.published import page, rows
from docs.planned.published.trainings import TRAININGS
from lingvo_gshard.core.config import names

_ALL = "all"


def main() -> None:
    """Plans what the command line asks for, and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.planned.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--training", default="", help="the key of a training, or all")
    parser.add_argument("--again", action="store_true", help="plan anew")
    given = parser.parse_args()
    keys = [training.key for training in TRAININGS]
    if given.training not in ("", _ALL, *keys):
        nearest = names.nearest(given.training, (*keys, _ALL))
        raise SystemExit(f"--training={given.training} is unknown. {nearest}")
    # One process plans TPUs and GPUs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    for training in TRAININGS:
        is_chosen = given.training in (training.key, _ALL)
        if is_chosen and (given.again or training.key not in rows.load()):
            print(training.key)
            found = rows.load()
            row = rows.make(training, found.get(training.key))
            rows.save(rows.load() | {row.model: row})
    page.write(rows.load())


if __name__ == "__main__":
    main()
