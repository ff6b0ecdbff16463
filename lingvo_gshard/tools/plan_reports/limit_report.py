"""Prints what a change does to the limited quantities of a plan, also as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import rich.console
from absl import flags

from lingvo_gshard.planning.plan import limits
from lingvo_gshard.planning.plan.diff import Change
from lingvo_gshard.planning.plan.limits import Checked
from lingvo_gshard.tools.plan_reports.diff_report import value_text
from lingvo_gshard.tools.plan_reports.layout import make_table, say

_HEADINGS = ("limit", "before", "after", "change", "verdict")
# Exit code of `diff` if a limit is exceeded.
EXCEEDED = 2
# A comment on a pull request is cut after so many rows of changes.
_MOST_ROWS = 40


def define_diff_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `diff`."""
    flags.DEFINE_boolean(
        "allow_other_versions",
        False,
        "Lets `diff` compare plans that different versions of the compiler made.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "fail_on",
        "",
        "Limits of `diff`: how much a quantity of the second plan may differ from the first, such "
        f"as '{limits.EXAMPLE}'. The exit code is {EXCEEDED} if one is exceeded.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "markdown",
        None,
        "File to which `diff` writes limits and changes, for a comment on a pull request.",
        flag_values=values,
    )


def print_limits(checked: Sequence[Checked], console: rich.console.Console) -> None:
    """Prints a table of limits with the quantities before and after."""
    table = make_table(*_HEADINGS, right=("before", "after", "change"))
    for row in checked:
        table.add_row(*_cells(row))
    console.print(table)
    exceeded = sum(row.is_exceeded for row in checked)
    say(console, f"{exceeded} of {len(checked)} limits exceeded.")


def markdown(checked: Sequence[Checked], changes: Sequence[Change], names: Sequence[str]) -> str:
    """Returns limits and changes as Markdown, for a comment on a pull request.

    Args:
      checked: the limits; may be empty.
      changes: all changes.
      names: names of the two plans.
    """
    lines = [f"### Plan of {names[1]}, compared with {names[0]}", ""]
    if checked:
        lines += _table(_HEADINGS, [_cells(row) for row in checked])
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


def _cells(row: Checked) -> tuple[str, ...]:
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
