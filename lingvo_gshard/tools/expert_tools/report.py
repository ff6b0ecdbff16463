"""Shows what a trained model's experts do with each language.

    gshard-experts report --logdir=runs/quickstart
    gshard-experts report --logdir=runs/quickstart --languages=es,pt,de --html=experts.html

The model reads rows of each language with their translations, as in training but with the capacity
and the choices of evaluation. Of each layer with experts and each language a table shows

    taken       of the places in experts' buffers, the share that tokens took
    violation   the largest load of an expert over the mean one, less 1; 0 is even
    dropped     of the places that tokens asked for, the share that they did not get
    dead        experts that no token came to
    entropy     of a token's gates over all experts, in nats; 0: the router is sure, ln E: it is not
    most used   the experts with most tokens, and their share of all

and under it how far languages differ: the share of tokens that would have to go to other experts
for a language to use them as all do, on average over languages.

--html writes a page with a map of layers by languages by experts; --json all numbers, each expert's
load among them; --json alone prints it, and the tables then go to standard error. Layers that are
compiled as one loop go by their own names here: they are run one by one.
"""

from __future__ import annotations

import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.decoding import Translator
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.expert_tools import picture
from lingvo_gshard.tools.expert_tools.converted import Whole
from lingvo_gshard.tools.expert_tools.rows import define_row_flags, rows_asked_for, use_by_language
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.training.monitoring.expert_use import ExpertUse

_MOST_USED = 3


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    define_row_flags(values, "test")
    flags.DEFINE_string("html", None, "File for a page with the map.", flag_values=values)
    output.define_json_flag(values, "all numbers")
    return values


def run(values: flags.FlagValues, console: rich.console.Console) -> None:
    """Does what the flags ask for; ValueError for a user's mistake."""
    run_ = Run(required_logdir(values))
    run_.check_decoder(Translator)
    rows = rows_asked_for(values, run_)
    whole = Whole.read(run_, parts=("theta",))
    use = use_by_language(run_, whole.trainer.task, whole.theta, rows, console)
    record = {
        "logdir": values.logdir,
        "experiment": run_.params.name,
        "step": whole.checkpoint.step,
        "split": values.split,
        "rows": len(rows),
        "layers": to_record(use),
    }
    _print(console, record)
    output.write_json(values.json, record)
    if values.html:
        output.write_text(values.html, picture.to_html(record), "html")


def to_record(use: dict[str, dict[str, ExpertUse]]) -> list[dict]:
    """Returns the layers with what they do with each language and with all, as JSON values."""
    layers = next(iter(use.values()))
    return [
        _layer(path, {language: found[path] for language, found in use.items()}) for path in layers
    ]


def _layer(path: str, use: dict[str, ExpertUse]) -> dict:
    first, *rest = use.values()
    total = sum(rest, first)
    languages = np.stack([found.shares for found in use.values()])
    away = np.abs(languages - languages.mean(0)).sum(1) / 2
    return {
        "path": path,
        "num_experts": len(total.load),
        "languages_differ": float(away.mean()),
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
            title=rich.text.Text(f"{layer['path']}: {layer['num_experts']} experts"),
            title_justify="left",
            caption=f"languages differ by {layer['languages_differ']:.1%} of their tokens",
            caption_justify="left",
        )
        table.add_column("language")
        for name in ("tokens", "taken", "violation", "dropped", "dead", "entropy"):
            table.add_column(name, justify="right")
        table.add_column("most used", no_wrap=True)
        for language, found in layer["languages"].items():
            table.add_row(language, *_cells(found))
        if len(layer["languages"]) > 1:
            table.add_section()
            table.add_row("all", *_cells(layer["all"]), style="bold")
        console.print(table)


def _cells(found: dict) -> list[str]:
    load = np.asarray(found["load"])
    most = np.argsort(-load, kind="stable")[:_MOST_USED]
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
