"""Prints the differences between two plans."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from lingvo_gshard.core import UserError, names
from lingvo_gshard.tools.console import make_table, output, units
from lingvo_gshard.tools.flags.definitions import Flags, refuse, string, switch
from lingvo_gshard.wings.planning.plan import diff, plan
from lingvo_gshard.wings.planning.plan.diff import Checked, PlanDifference, is_number

_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": units.in_bytes,
    "seconds": units.in_seconds,
    "flops": units.in_flops,
    "count": units.in_count,
    "number": units.in_large,
    "rate": units.in_large,
    "share": units.in_share,
}
# The report is no wider than this, also in a file or on a wider terminal.
_WIDEST = 100
# Values of more characters have lines of their own instead of cells.
_LONGEST_CELL = 20
_GAP = 2
_HEADINGS = ("before", "after", "ratio")

Cells = tuple[str, str, str, str]


def print_diff(changes: Sequence[PlanDifference], console: output.Console) -> None:
    """Prints the changes of each section: numbers as a table, long texts on lines of their own."""
    if not changes:
        console.say("Nothing changed.")
    width = min(console.width, _WIDEST)
    for index, (section, group) in enumerate(itertools.groupby(changes, lambda c: c.section)):
        if index:
            console.say("")
        for line in _lines(section, list(group), width):
            console.say(line)


def _lines(section: str, changes: Sequence[PlanDifference], width: int) -> Iterator[str]:
    """Yields the lines of a section, none of them wider than `width`."""
    cells = [_cells(change) for change in changes]
    short = [row for row in cells if _is_short(row)]
    sizes = [
        max(map(len, column)) for column in zip(_HEADINGS, *(r[1:] for r in short), strict=True)
    ]
    room = width - sum(sizes) - _GAP * len(sizes)
    names = [section, *(row[0] for row in short)]
    label = min(max(map(len, names)), room)
    yield _row((section, *_HEADINGS), label, sizes)
    yield "─" * (label + sum(sizes) + _GAP * len(sizes))
    for what, group in itertools.groupby(zip(changes, cells, strict=True), lambda c: c[0].what):
        items = list(group)
        if items[0][0].field:
            yield from _wrapped(what, width)
        for _, row in items:
            yield from _change_lines(row, label, sizes, width)


def _change_lines(row: Cells, label: int, sizes: Sequence[int], width: int) -> Iterator[str]:
    if _is_short(row):
        *above, last = _wrapped(row[0], label)
        yield from above
        yield _row((last, *row[1:]), label, sizes)
        return
    yield from _wrapped(row[0], width)
    indent = len(row[0]) - len(row[0].lstrip()) + 2
    is_in_one = units.MISSING in row[1:3]
    for heading, text in zip(_HEADINGS, row[1:3], strict=False):
        if text != units.MISSING:
            start = f"{'':{indent}}{'only ' * is_in_one}{heading:<6}  "
            yield from _wrapped(start + text, width, hanging=len(start))


def _cells(change: PlanDifference) -> Cells:
    """Returns a change's name, indented if it is a field, its values and their ratio, as text."""
    name = f"  {change.field}" if change.field else change.what
    ratio = f"x{units.digits(change.ratio)}" if change.ratio is not None else ""
    # The value of a note is its own name.
    before, after = (
        "present" if value == change.what else value_text(value, change.unit)
        for value in (change.before, change.after)
    )
    return name, before, after, ratio


def _is_short(row: Cells) -> bool:
    return max(len(row[1]), len(row[2])) <= _LONGEST_CELL


def _row(cells: Sequence[str], label: int, sizes: Sequence[int]) -> str:
    values = (f"{cell:>{size + _GAP}}" for cell, size in zip(cells[1:], sizes, strict=True))
    return f"{cells[0]:<{label}}{''.join(values)}".rstrip()


def _wrapped(text: str, width: int, hanging: int | None = None) -> list[str]:
    """Returns the lines of a text. Those after the first begin at column `hanging`."""
    indent = len(text) - len(text.lstrip())
    return textwrap.wrap(
        text.strip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if hanging is None else hanging),
        break_on_hyphens=False,
    )


def value_text(value: Any, unit: str) -> str:
    """Returns a value as text; numbers in a unit of `PlanDifference.unit`."""
    if value is None:
        return units.MISSING
    if unit in _UNITS and is_number(value):
        return _UNITS[unit](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


_LIMIT_HEADINGS = ("limit", "before", "after", "change", "verdict")
# Exit code of `diff` if a limit is exceeded.
EXCEEDED = 2
# A comment on a pull request is cut after so many rows of changes.
_MOST_ROWS = 40


DIFF_FLAGS: Flags = dict(
    allow_other_versions=switch(
        "Lets `diff` compare plans that different versions of the compiler made."
    ),
    fail_on=string(
        "Limits of `diff`: how much a quantity of the second plan may differ from the first, "
        f"such as '{diff.EXAMPLE}'. The exit code is {EXCEEDED} if one is exceeded.",
        "",
    ),
    markdown="File to which `diff` writes limits and changes, for a comment on a pull request.",
)


def markdown(
    checked: Sequence[Checked], changes: Sequence[PlanDifference], names: Sequence[str]
) -> str:
    """Returns limits and changes as Markdown, for a comment on a pull request."""
    lines = [f"### Plan of {names[1]}, compared with {names[0]}", ""]
    if checked:
        lines += _table(_LIMIT_HEADINGS, [_limit_cells(row) for row in checked])
    if not changes:
        lines += ["Nothing changed."]
    for section, group in itertools.groupby(changes[:_MOST_ROWS], lambda change: change.section):
        rows = [
            (
                " ".join(filter(None, (change.what, change.field))),
                value_text(change.before, change.unit),
                value_text(change.after, change.unit),
            )
            for change in group
        ]
        lines += _table((section, "before", "after"), rows)
    if len(changes) > _MOST_ROWS:
        lines += [f"And {len(changes) - _MOST_ROWS} more changes."]
    return "\n".join(lines) + "\n"


def _limit_cells(row: Checked) -> tuple[str, ...]:
    change = ""
    if row.before is not None and row.after is not None:
        difference = row.after - row.before
        share = f" ({difference / abs(row.before):+.2%})" if row.before else ""
        sign = "+" if difference >= 0 else "-"
        change = f"{sign}{value_text(abs(difference), row.unit)}{share}"
    verdict = "exceeded" if row.is_exceeded else "ok"
    before, after = (value_text(value, row.unit) for value in (row.before, row.after))
    return row.limit.text, before, after, change, verdict


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *("---:" for _ in headings[1:])]
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (headings, ruler, *escaped)] + [""]


DIFF = "diff"
_DIFF_FLAGS = ("json", "allow_other_versions", "fail_on", "markdown")


def compared_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the two files that `diff` compares, none without `diff`, and the remaining arguments.

    Raises UserError for another subcommand or another number of files.
    """
    subcommand = next(iter(argv[1:]), DIFF)
    if not subcommand.startswith("-") and subcommand != DIFF:
        raise UserError(
            f"the subcommand {subcommand!r} is unknown. {names.nearest(subcommand, [DIFF])} "
            "Without one, flags or the file of a program say what to plan, see --help"
        )
    if argv[1:2] != [DIFF]:
        return [], argv
    compared = [argument for argument in argv[2:] if not argument.startswith("--")]
    rest = [argument for argument in argv[2:] if argument.startswith("--")]
    if len(compared) != 2 and not set(rest) & {"--help", "-h"}:
        raise UserError(
            f"gshard-plan {DIFF} compares two files written by --json; {len(compared)} "
            f"{'was' if len(compared) == 1 else 'were'} given"
        )
    return compared, [argv[0], *rest]


def run(compared: list[str], values: flags.FlagValues, console: output.Console) -> int:
    """Compares two plans and returns the exit code. Raises UserError for a wrong flag or file."""
    valid = " and ".join(f"--{flag}" for flag in _DIFF_FLAGS)
    others = [name for name in values if name not in _DIFF_FLAGS]
    refuse(values, others, f"does not apply to {DIFF}, only {valid}")
    limited = diff.parse(values.fail_on)
    output.check_writable(values, "markdown")
    before, after = (plan.load(path) for path in compared)
    allowed, names = values.allow_other_versions, (compared[0], compared[1])
    changes = diff.diff(before, after, allow_other_versions=allowed, names=names)
    print_diff(changes, console)
    checked = [limit.check(before, after) for limit in limited]
    if checked:
        table = make_table(*_LIMIT_HEADINGS, right=("before", "after", "change"))
        for row in checked:
            table.add_row(*_limit_cells(row))
        console.print(table)
        exceeded = sum(row.is_exceeded for row in checked)
        console.say(f"{exceeded} of {len(checked)} limits exceeded.")
    if values.markdown:
        text = markdown(checked, changes, compared)
        pathlib.Path(values.markdown).write_text(text, encoding="utf-8")
    rows = [{**dataclasses.asdict(change), "ratio": change.ratio} for change in changes]
    output.write_json(values.json, rows)
    return EXCEEDED if any(row.is_exceeded for row in checked) else 0
