"""gshard-plan diff: compares two plans, and refuses changes that exceed limits."""

from __future__ import annotations

import dataclasses
import pathlib

import rich.console
from absl import flags

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.plan import diff, file, limits
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.plan_reports import diff_report, limit_report

DIFF = "diff"
_DIFF_FLAGS = ("json", "allow_other_versions", "fail_on", "markdown")


def compared_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the two files that `diff` compares and the remaining arguments.

    Without `diff` there are no files, and all arguments remain.

    Raises:
      UserError: another subcommand was given, or another number of files.
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


def run(compared: list[str], values: flags.FlagValues, console: rich.console.Console) -> int:
    """Compares two plans and returns the exit code.

    Args:
      compared: the files of the plans.
      values: the flags.
      console: where the report goes.

    Raises:
      UserError: a flag does not apply, or a file is no plan.
    """
    for name in values:
        if values[name].present and name not in _DIFF_FLAGS:
            valid = " and ".join(f"--{flag}" for flag in _DIFF_FLAGS)
            raise UserError(f"{DIFF} does not take --{name}={values[name].value}, only {valid}")
    limited = limits.parse(values.fail_on)
    output.check_writable(values, "markdown")
    before, after = (file.load(path) for path in compared)
    changes = diff.diff(
        before,
        after,
        allow_other_versions=values.allow_other_versions,
        names=(compared[0], compared[1]),
    )
    diff_report.print_diff(changes, console)
    checked = [limit.check(before, after) for limit in limited]
    if checked:
        limit_report.print_limits(checked, console)
    if values.markdown:
        text = limit_report.markdown(checked, changes, compared)
        pathlib.Path(values.markdown).write_text(text, encoding="utf-8")
    rows = [{**dataclasses.asdict(change), "ratio": change.ratio} for change in changes]
    output.write_json(values.json, rows)
    return limit_report.EXCEEDED if any(row.is_exceeded for row in checked) else 0
