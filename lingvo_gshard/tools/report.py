"""Reports on trained runs: a page for a browser, tables, or JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rich.markup import escape

from lingvo_gshard.api import tables
from lingvo_gshard.tasks import Table
from lingvo_gshard.tools.console import in_bytes, output, startup
from lingvo_gshard.tools.flags.definitions import maker, repeated
from lingvo_gshard.training import DEVICE_MEMORY, HOST_MEMORY
from lingvo_gshard.wings.reporting import page
from lingvo_gshard.wings.reporting.run import RunReport
from lingvo_gshard.wings.reporting.runs_report import Report, read_report

NAME = "gshard-report"

# More differences, layers or marked steps than these are only on the page and in the JSON.
_MOST_ROWS = 20

define_flags = maker(
    logdir=repeated(
        "Directory of a run. Repeat the flag, or separate several directories by commas, to "
        "compare runs.",
        [],
    ),
    html="HTML file to write the report to, for a browser.",
    json=output.json_flag("the report"),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    output.check_writable(values, "html", "json")
    logdirs = [part for given in values.logdir for part in given.split(",") if part]
    console = output.make_console(values.json, values.html)
    report = read_report(logdirs)
    if values.html is None:
        _print(console, report)
    output.write_text(values.html, page.to_html(report) if values.html else "", "html")
    output.write_json(values.json, report)
    if values.html not in (None, output.STANDARD_OUTPUT):
        labels = ", ".join(run.label for run in report.runs)
        console.say(f"Report on {labels} written to {values.html}")
    return 0


def _print(console: output.Console, report: Report) -> None:
    labels = [run.label for run in report.runs]
    rows = [(name, *(show(run) for run in report.runs)) for name, show in _FIGURES.items()]
    rows = [row for row in rows if any(row[1:])]
    _print_table(console, ("", *labels), rows)
    scored = [
        (run.label, f"{row.step:,}", row.split, row.size, _scores(row.scores))
        for run in report.runs
        for row in run.evaluations
    ]
    if scored:
        _print_table(console, ("scored", "step", "split", "size", ""), scored, (0, 2, 3, 4))
    for run in report.runs:
        _print_marked(console, run)
    _print_layers(console, report)
    if report.differences:
        shown = report.differences[:_MOST_ROWS]
        rows = [(row.path, *(value or "" for value in row.values)) for row in shown]
        _print_table(console, ("differs", *labels), rows, range(len(labels) + 1))
        _say_more(console, len(report.differences) - len(shown), "differences")
    for run in report.runs:
        for launch in run.launches[-1:]:
            console.say(f"{run.label}: {launch.command}")


def _print_table(
    console: output.Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: Sequence[int] = (0,),
) -> None:
    """Prints a table whose texts are shown as they are: rich would read brackets as markup."""
    cells = [[escape(cell) for cell in row] for row in rows]
    heads = [escape(column) for column in columns]
    tables.print_table(console, tables.rich_table(Table(heads, cells, text_columns=text_columns)))


def _tail(name: str, form: str, run: RunReport) -> str:
    """Returns the mean of a metric over the last steps of a run."""
    value = run.history.tail.get(name)
    return "" if value is None else format(value, form)


def _best(name: str, form: str, run: RunReport) -> str:
    """Returns the best value of a metric of the dev split."""
    points = run.history.dev.get(name)
    if points is None:
        return ""
    value, step = min(zip(points.values, points.steps, strict=True))
    return f"{value:{form}} at step {step:,}"


def _memory(name: str, run: RunReport) -> str:
    curve = run.history.curves.metrics.get(name)
    values = [value for value in (curve.high or curve.mean) if value] if curve else []
    return in_bytes(max(values)) if values else ""


def _steps(run: RunReport) -> str:
    reached = f"{run.history.last_step:,}"
    return f"{reached} of {run.steps:,}" if run.steps else reached


def _devices(run: RunReport) -> str:
    if not run.launches:
        return ""
    strategy = run.sharding.strategy if run.sharding else ""
    devices = run.launches[-1].devices
    return f"{devices}, strategy {strategy}" if strategy else devices


def _compiling(run: RunReport) -> str:
    if not run.programs:
        return ""
    total = sum(program.seconds for program in run.programs)
    again = len(run.recompilations)
    return f"{total:.1f} s, {len(run.programs)} programs" + (f", {again} again" if again else "")


_FIGURES: dict[str, Callable[[RunReport], str]] = {
    "experiment": lambda run: run.experiment,
    "steps": _steps,
    "loss": functools.partial(_tail, "loss", ".4f"),
    "dev loss, best": functools.partial(_best, "loss", ".4f"),
    "dev perplexity, best": functools.partial(_best, "perplexity", ",.2f"),
    "gradient norm": functools.partial(_tail, "gradient_norm", ".4g"),
    "learning rate": functools.partial(_tail, "learning_rate", ".3g"),
    "tokens per second": functools.partial(_tail, "tokens_per_second", ",.0f"),
    "memory of the host's process": functools.partial(_memory, HOST_MEMORY),
    "peak memory of a device": functools.partial(_memory, DEVICE_MEMORY),
    "devices": _devices,
    "compiling": _compiling,
    "launches": lambda run: f"{len(run.launches)}" if run.launches else "",
    "spikes": lambda run: f"{run.history.spikes.count:,}" if run.history.spikes.count else "",
}


def _scores(scores: dict) -> str:
    """Returns the main scores of an evaluation on one line."""
    average = (scores.get("average") or {}).get("translated") or {}
    parts = [f"{name} {average[key]:.1f}" for key, name in _AVERAGES.items() if key in average]
    parts += [f"{words} {scores[key]:.4g}" for key, words in _SCORES.items() if key in scores]
    return ", ".join(parts)


_AVERAGES = {"chrf": "chrF", "bleu": "BLEU"}
_SCORES = {"bits_per_byte": "bits per byte", "perplexity": "perplexity", "accuracy": "accuracy"}


def _print_marked(console: output.Console, run: RunReport) -> None:
    """Prints the unusual steps of a run, such as spikes, roll-backs and recompilations."""
    for words, marked in (("spikes", run.history.spikes), ("not finite", run.history.not_finite)):
        if marked.count:
            shown = ", ".join(f"{step:,}" for step in marked.steps[:_MOST_ROWS])
            more = f" and {marked.count - _MOST_ROWS:,} more" if marked.count > _MOST_ROWS else ""
            console.say(f"{run.label}: {words} at step {shown}{more}")
    for back in run.roll_backs[:_MOST_ROWS]:
        console.say(f"{run.label}: rolled back from step {back.step:,} to step {back.last_step:,}")
    for again in run.recompilations[:_MOST_ROWS]:
        changes = "; ".join(again.changes) or "the same inputs"
        console.say(
            f"{run.label}: compiled again for step {again.step:,}, in {again.seconds:.1f} s: "
            f"{changes}"
        )


def _print_layers(console: output.Console, report: Report) -> None:
    """Prints the bytes of each layer on one device of each run."""
    for run, layers in zip(report.runs, report.layers, strict=True):
        if not run.sharding:
            continue
        ordered = sorted(layers, key=lambda row: -row.weights - row.moments)[:_MOST_ROWS]
        rows = [(r.layer, *map(in_bytes, (r.weights, r.moments, r.bytes))) for r in ordered]
        where = run.sharding.mesh or "one device"
        columns = (f"{run.label}, {where}", "weights\nper device", "moments\nper device", "in all")
        _print_table(console, columns, rows)
        _say_more(console, len(layers) - len(rows), "layers")


def _say_more(console: output.Console, count: int, what: str) -> None:
    if count > 0:
        console.say(f"and {count:,} more {what}; --json and --html have all")
