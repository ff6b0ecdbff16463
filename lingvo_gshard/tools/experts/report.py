"""Reports which experts of a trained model each language uses.

    gshard-experts report --logdir=runs/quickstart
    gshard-experts report --logdir=runs/quickstart --languages=es,pt,de --html=experts.html

The model reads rows of each language with their translations, with the capacity of evaluation. A
table for each layer with experts has a line for each language:

    used        share of the capacity slots that held a token
    violation   largest load of an expert over the mean load, minus 1; 0 is even
    dropped     share of the requested capacity slots that were full
    dead        experts that got no token
    entropy     of a token's gates, in nats; 0: the router is certain, ln E: it is indifferent
    most used   the experts with the most tokens, and their share of the tokens

The lines below a table say how much languages differ: the mean share of a language's tokens that
would have to change experts for the language to use the experts as all languages do; and which
share of their choices two languages have in common, of one family and of different ones.

--html writes a page with a map of experts by language for each layer. --json writes all numbers,
including the load of each expert, and what training saw of the routers (gshard-experts watched) up
to the checkpoint, but for languages and classes: gshard-plan --loads plans with these. Without a
file name it prints them, and the tables go to standard error.
"""

from __future__ import annotations

import msgspec
import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags
from rich.text import Text

from lingvo_gshard.api import tables
from lingvo_gshard.api.run import Run
from lingvo_gshard.inference.translator import Translator
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.experts import heat_map
from lingvo_gshard.tools.experts.family_overlap import FamilyOverlap
from lingvo_gshard.tools.experts.language_use import (
    choose_rows_by_flags,
    define_row_flags,
    use_by_language,
)
from lingvo_gshard.tools.experts.source_run import SourceRun
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.training.run.monitoring.data_progress import DataProgress
from lingvo_gshard.training.run.monitoring.expert_use import ExpertUse
from lingvo_gshard.training.run.routers.records import RouterRecord, routers_of_run

_MOST_SHOWN = 3
# The columns of the report after the language.
NUMBERS = ("tokens", "used", "violation", "dropped", "dead", "entropy")
MOST_USED = "most used"


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    define_row_flags(values, "test")
    flags.DEFINE_string(
        "html", None, "File for an HTML page with maps of experts by language.", flag_values=values
    )
    output.define_json_flag(values, "all numbers")
    return values


def run(values: flags.FlagValues, console: rich.console.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    output.check_writable(values, "html")
    with DataProgress(console) as stages:
        stages.begin("Starting")
        run = Run(required_logdir(values))
        run.observer = stages
        run.check_decoder(Translator)
        rows = choose_rows_by_flags(values, run)
        source = SourceRun.read(run, parts=("theta",))
    use = use_by_language(run, source.trainer.task, source.theta, rows, console)
    record = {
        "logdir": values.logdir,
        "experiment": run.params.name,
        "step": source.checkpoint.step,
        "split": values.split,
        "rows": len(rows),
        "layers": to_record(use),
        "watched": _watched(values.logdir, source.checkpoint.step),
    }
    _print(console, record)
    output.write_json(values.json, record)
    if values.html:
        output.write_text(values.html, heat_map.to_html(record), "html")
    return 0


def to_record(use: dict[str, dict[str, ExpertUse]]) -> list[dict]:
    """Returns the use of each layer's experts, by language and in total, as JSON values.

    Args:
      use: language -> path of a layer -> use of its experts.
    """
    layers = next(iter(use.values()))
    return [
        _layer(path, {language: found[path] for language, found in use.items()}) for path in layers
    ]


def _watched(logdir: str, step: int) -> list[RouterRecord]:
    """Returns the records of watched routers up to a step, without languages and classes."""
    return [
        msgspec.structs.replace(record, by_language={}, by_class={})
        for record in routers_of_run(logdir)
        if record.step <= step
    ]


def _layer(path: str, use: dict[str, ExpertUse]) -> dict:
    first, *rest = use.values()
    total = sum(rest, first)
    shares = {language: found.shares for language, found in use.items()}
    languages = np.stack(list(shares.values()))
    away = np.abs(languages - languages.mean(0)).sum(1) / 2
    return {
        "path": path,
        "num_experts": len(total.load),
        "languages_differ": float(away.mean()),
        "family_overlap": FamilyOverlap.of(shares),
        "languages": {language: _numbers(found) for language, found in use.items()},
        "all": _numbers(total),
    }


def _numbers(use: ExpertUse) -> dict:
    return {
        "tokens": int(use.tokens),
        "utilization": use.utilization,
        "largest_violation": use.largest_violation,
        "dropped_share": use.dropped_share,
        "dead_experts": use.dead_experts,
        "router_entropy": use.router_entropy,
        "load": use.load.tolist(),
    }


def _print(console: rich.console.Console, record: dict) -> None:
    head = f"{record['experiment']}, step {record['step']:,}: {record['rows']:,} rows of "
    console.print(f"{head}{record['split']}", markup=False)
    for layer in record["layers"]:
        table = rich.table.Table(
            box=rich.box.SIMPLE,
            title=Text(f"{layer['path']}: {layer['num_experts']} experts"),
            title_justify="left",
            caption=_caption(layer),
            caption_justify="left",
        )
        table.add_column("language")
        for name in NUMBERS:
            table.add_column(name, justify="right")
        table.add_column(MOST_USED, no_wrap=True)
        for language, found in layer["languages"].items():
            table.add_row(language, *_cells(found))
        if len(layer["languages"]) > 1:
            table.add_section()
            table.add_row("all", *_cells(layer["all"]), style="bold")
        tables.print_table(console, table)


def _caption(layer: dict) -> str:
    lines = [f"languages differ by {layer['languages_differ']:.1%} of their tokens"]
    overlap: FamilyOverlap = layer["family_overlap"]
    if overlap.within is not None and overlap.between is not None:
        lines.append(
            f"two languages of a family share {overlap.within:.1%} of their choices, of different "
            f"families {overlap.between:.1%}"
        )
    return "\n".join(lines)


def _cells(found: dict) -> list[str]:
    load = np.asarray(found["load"])
    most = np.argsort(-load, kind="stable")[:_MOST_SHOWN]
    shares = load / max(load.sum(), 1.0)
    entropy = found["router_entropy"]
    return [
        f"{found['tokens']:,}",
        f"{found['utilization']:.1%}",
        f"{found['largest_violation']:.2f}",
        f"{found['dropped_share']:.1%}",
        f"{found['dead_experts']}",
        "-" if entropy is None else f"{entropy:.2f}",
        "  ".join(f"{expert} ({shares[expert]:.0%})" for expert in most if load[expert]),
    ]
