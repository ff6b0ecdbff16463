"""The subcommand `gshard-bench parity`."""

from __future__ import annotations

import os
import pathlib
import tempfile

import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.benchmarks.parity.case import Case
from lingvo_gshard.tools.benchmarks.parity.cases import CASES
from lingvo_gshard.tools.benchmarks.parity.measure import Row, measure
from lingvo_gshard.tools.benchmarks.parity.peer import LIBRARIES, Peer
from lingvo_gshard.tools.benchmarks.peer_python import find_python


def run(values: flags.FlagValues, console: rich.console.Console) -> list[Row]:
    """Compares the models of --families, and returns the rows.

    Raises:
      UserError: a family is unknown, or there is no Python with transformers.
    """
    cases = chosen_cases(values.families)
    python = find_python(values.peers_python, LIBRARIES)
    if not python:
        raise UserError(
            "parity compares with transformers, which is not installed: --peers_python names "
            "another Python that has torch and transformers"
        )
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with (
        tempfile.TemporaryDirectory(prefix="gshard-parity-") as folder,
        console.status("starting transformers") as status,
        Peer(python, cases, pathlib.Path(folder), threads) as peer,
    ):
        for row in measure(cases, peer, pathlib.Path(folder), status.update):
            console.print(f"{row.family}, {row.option}: {row.logits:.1e}")
            rows.append(row)
    return rows


def chosen_cases(families: list[str]) -> list[Case]:
    """Returns the cases of these families; of all if none is given.

    Raises:
      UserError: a family has no case.
    """
    known = {case.model_type for case in CASES}
    for family in families:
        if family not in known:
            raise UserError(f"--families={family} is unknown. {names.nearest(family, known)}")
    return [case for case in CASES if not families or case.model_type in families]


def print_table(console: rich.console.Console, rows: list[Row]) -> None:
    """Prints the rows of `gshard-bench parity`, in the form of a table of Markdown."""
    table = rich.table.Table(
        "family",
        "option",
        "logits",
        "bfloat16 (theirs)",
        "gradients",
        "greedy",
        "round trip",
        "loaded",
        box=rich.box.MARKDOWN,
    )
    for row in rows:
        ours, theirs = row.logits_bfloat16
        table.add_row(
            row.family,
            row.option,
            f"{row.logits:.1e}",
            f"{ours:.2f} ({theirs:.2f})",
            f"{row.gradients:.1e}",
            f"{row.equal_tokens} of {row.tokens}",
            "bit-equal" if row.is_bit_equal else "differs",
            f"{row.exported:.0e}",
        )
    tables.print_table(console, table)
