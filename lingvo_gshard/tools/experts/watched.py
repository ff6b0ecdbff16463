"""Shows what a run saw of its routers while it trained: collapse, dead experts, languages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import rich.table
import rich.text
from absl import flags

from lingvo_gshard.core import UserError, names
from lingvo_gshard.tools.console import make_table, output
from lingvo_gshard.tools.flags.definitions import integer, maker
from lingvo_gshard.tools.flags.run import LOGDIR, required_logdir
from lingvo_gshard.wings.services.routers.router_records import RouterRecord, routers_of_run

KINDS = ("language", "class")
_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 32
_MOST_SHOWN = 4

define_flags = maker(
    logdir=LOGDIR,
    layer="Shows the layers with this text in their path.",
    by="Shows the experts of each language, or of each class.",
    step=integer("Shows this watched step; default: the last one.", least=1),
    json=output.json_flag("all records"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    if values.by is not None:
        names.check(values.by, KINDS, f"--by={values.by} is unknown")
    records = _chosen(values)
    step = records[-1].step
    shown = [record for record in records if record.step == step]
    steps = sorted({record.step for record in records})
    count = f"{len(steps):,} watched step{'s' * (len(steps) > 1)}"
    console.print(f"{values.logdir}: {count}, {steps[0]:,} to {step:,}", markup=False)
    if values.by:
        for record in shown:
            console.print_table(_table_by(record, values.by))
    else:
        console.print_table(_table(shown, records))
    output.write_json(values.json, records)
    return 0


def _chosen(values: flags.FlagValues) -> list[RouterRecord]:
    """Returns the records up to the chosen step, of the chosen layers; ValueError if none is."""
    logdir = required_logdir(values)
    records = routers_of_run(logdir)
    if not records:
        raise UserError(
            f"--logdir={logdir} has no records of watched routers: the model has no experts, "
            "run.routers.every_steps is 0, or the run has not reached that many steps"
        )
    steps = sorted({record.step for record in records})
    step = values.step or steps[-1]
    if step not in steps:
        nearest = min(steps, key=lambda one: abs(one - step))
        raise UserError(f"--step={step} was not watched. The nearest one is {nearest}")
    layers = list(dict.fromkeys(record.layer for record in records))
    chosen = [layer for layer in layers if (values.layer or "") in layer]
    if not chosen:
        raise UserError(
            f"--layer={values.layer} is in no path of a layer with experts. "
            f"{names.nearest(values.layer, layers)}"
        )
    return [record for record in records if record.layer in chosen and record.step <= step]


def _table(shown: Sequence[RouterRecord], records: Sequence[RouterRecord]) -> rich.table.Table:
    """Returns the table of layers, from the records of one step and of all steps up to it."""
    numbers = ("busiest", "even", "effective", "dropped", "entropy", "balance")
    table = make_table("layer", "router", right=numbers)
    table.add_column("dead")
    table.add_column("over time", no_wrap=True)
    for record in shown:
        expert, share = record.busiest
        distance, entropy = record.balance_distance, record.token_entropy
        earlier = [r.busiest[1] for r in records if r.layer == record.layer]
        table.add_row(
            rich.text.Text(record.layer),
            record.router,
            f"{expert} ({share:.1%})",
            f"{1 / record.num_experts:.1%}",
            f"{math.exp(record.load_entropy):.1f} of {record.num_experts}",
            f"{record.dropped_share:.1%}",
            "-" if entropy is None else f"{entropy:.2f}",
            "-" if distance is None else f"{distance:+.1%}",
            _dead(record),
            _bars(earlier, 1 / record.num_experts),
        )
    return table


def _table_by(record: RouterRecord, kind: str) -> rich.table.Table:
    """Returns the table of the languages or classes of one layer."""
    counts = record.by_language if kind == "language" else record.by_class
    title = f"{record.layer}: {record.num_experts} experts, step {record.step:,}"
    table = make_table(kind, right=("choices", "differs"), title=title)
    table.add_column("most used", no_wrap=True)
    for name, choices in [*counts.items(), ("all", record.choices)]:
        load = np.asarray(choices, np.float64)
        shares = load / max(load.sum(), 1.0)
        most = np.argsort(-load, kind="stable")[:_MOST_SHOWN]
        table.add_row(
            rich.text.Text(name),
            f"{int(load.sum()):,}",
            f"{np.abs(shares - record.load).sum() / 2:.1%}",
            "  ".join(f"{expert} ({shares[expert]:.0%})" for expert in most if load[expert]),
        )
    return table


def _dead(record: RouterRecord) -> str:
    shown = [f"{e} since {since:,}" for e, since in list(record.dead_since.items())[:_MOST_SHOWN]]
    more = len(record.dead_since) - len(shown)
    return ", ".join(shown + ([f"{more} more"] if more else [])) or "none"


def _bars(shares: Sequence[float], even: float) -> str:
    """Returns a bar for each share, from an even one to all; few bars are means of many shares."""
    parts = np.array_split(np.asarray(shares), min(len(shares), _MOST_BARS))
    heights = [(float(part.mean()) - even) / (1.0 - even) if even < 1 else 0.0 for part in parts]
    return "".join(_BARS[min(int(max(h, 0.0) * len(_BARS)), len(_BARS) - 1)] for h in heights)
