"""Compares imported models with transformers, family by family and option by option.

    python -m benchmarks parity --peers_python=peers/bin/python --families=llama,mixtral

transformers, of --peers_python, makes small random models of --families with each option of their
configs. Each is imported, and compared with transformers: logits, gradients, greedy tokens, and the
exported model's tensors and logits (docs/open_models.md). No speed is measured.

    python -m benchmarks parity --peers_python=peers/bin/python --variants=600 --seed=1

compares the logits of models whose configs have random changes instead. They must be equal, or the
config must be refused for a key with an effect in transformers. Otherwise the exit code is 1.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Collection, Iterable

import rich.box
import rich.table
from absl import flags

from benchmarks import common
from benchmarks.parity.cases import CASES
from benchmarks.parity.measure import ModelDifference, measure
from benchmarks.parity.peer import LIBRARIES, Peer
from benchmarks.parity.variants import EQUAL, FAULTS, REFUSED, VariantOutcome, VariantPeer, count
from benchmarks.parity.variants import measure as measure_variants
from benchmarks.peer_python import define_peer_flags, find_python
from lingvo_gshard.api import tables
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import Console, transient_stages
from lingvo_gshard.wings.open_models.families import FAMILIES


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags(experiment=False)
    define_peer_flags(values, "torch and transformers")
    flags.DEFINE_list("families", [], "Families to compare; by default all.", flag_values=values)
    flags.DEFINE_integer(
        "variants", 0, "Random configs to compare; 0: the cases.", 0, flag_values=values
    )
    flags.DEFINE_integer("seed", 1, "Seed of the variants.", flag_values=values)
    flags.DEFINE_integer("first", 0, "Number of the first variant.", 0, flag_values=values)
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Compares the models of --families, prints the table, and returns the exit code.

    Raises:
      UserError: a family is unknown, or there is no Python with transformers.
    """
    check_families(values.families, FAMILIES if values.variants else {c.model_type for c in CASES})
    cases = [case for case in CASES if case.model_type in (values.families or FAMILIES)]
    python = find_python(values.peers_python, LIBRARIES)
    if not python:
        raise UserError(
            "parity compares with transformers, which is not installed: --peers_python names "
            "another Python that has torch and transformers"
        )
    if values.variants:
        return run_variants(values, console, python)
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with (
        tempfile.TemporaryDirectory(prefix="gshard-parity-") as folder,
        transient_stages(console, "starting transformers") as progress,
        Peer(python, cases, pathlib.Path(folder), threads) as peer,
    ):
        for row in measure(cases, peer, pathlib.Path(folder), progress):
            console.print(f"{row.family}, {row.option}: {row.logits:.1e}")
            rows.append(row)
    print_table(console, rows)
    return common.write(values, rows)


def run_variants(values: flags.FlagValues, console: Console, python: str) -> int:
    """Compares random variants of --families, prints the faults and the numbers of outcomes.

    Returns the exit code: 1 if there is a fault.
    """
    families, rows = values.families or sorted(FAMILIES), []
    numbers = range(values.first, values.first + values.variants)
    with (
        tempfile.TemporaryDirectory(prefix="gshard-parity-") as folder,
        transient_stages(console, "starting transformers") as progress,
        VariantPeer(python, pathlib.Path(folder)) as peer,
    ):
        for row in measure_variants(families, numbers, values.seed, peer, progress):
            rows.append(row)
            if row.outcome in FAULTS:
                found = row.message or f"{row.difference:.1e}"
                console.print(f"{row.family}, {dict(row.changes)}: {row.outcome}, {found}")
    print_outcomes(console, rows)
    common.write(values, rows)
    return int(any(row.outcome in FAULTS for row in rows))


def print_outcomes(console: Console, rows: list[VariantOutcome]) -> None:
    """Prints the numbers of outcomes by family in the form of a table of Markdown."""
    names_of = (EQUAL, REFUSED, *FAULTS)
    table = rich.table.Table("family", *names_of, box=rich.box.MARKDOWN)
    for family in (*sorted({row.family for row in rows}), "all"):
        own = [row for row in rows if family in (row.family, "all")]
        table.add_row(family, *(str(count(own, outcome)) for outcome in names_of))
    tables.print_table(console, table)


def check_families(families: Iterable[str], known: Collection[str]) -> None:
    """Checks the values of --families.

    Raises:
      UserError: a family is unknown.
    """
    for family in families:
        if family not in known:
            raise UserError(f"--families={family} is unknown. {names.nearest(family, known)}")


def print_table(console: Console, rows: list[ModelDifference]) -> None:
    """Prints the rows in the form of a table of Markdown."""
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
