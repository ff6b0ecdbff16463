"""Reports which experts of a trained model each language uses."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np
from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import Layer, NestedMap, UserError, names, objects
from lingvo_gshard.data import Row, readers, rows_by_language
from lingvo_gshard.tools.console import make_table, output
from lingvo_gshard.tools.experts.source_run import SourceRun, opened
from lingvo_gshard.tools.flags.definitions import Flags, comma_list, integer, maker, string
from lingvo_gshard.tools.flags.run import LOGDIR
from lingvo_gshard.wings.evaluation.translation_scores import choose_rows
from lingvo_gshard.wings.fine_tuning.surgery import expert_use
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import ExpertUse
from lingvo_gshard.wings.inference.translator import Translator
from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.services.routers.router_records import routers_of_run

# Branches of Indo-European and families, as Glottolog 5 (https://glottolog.org) has them. Codes are
# ISO 639's; a creole stands with the language of its words.
_CODES = objects.table_beside(__file__, "language_families.json", dict[str, str])
_FAMILIES = {code: family for family, codes in _CODES.items() for code in codes.split()}
OTHER = "Other"


def family(language: str) -> str:
    """Returns the family of a code with any script or variant, as in "sr_Latn", "ca@valencia"."""
    return _FAMILIES.get(re.split("[_@-]", language)[0], OTHER)


class FamilyOverlap(msgspec.Struct, frozen=True):
    """Mean overlaps of the expert use of pairs of languages, in one layer.

    The overlap of two languages is the share of their choices that go to the same experts: the sum
    over experts of the smaller of the two languages' shares. It is 1 if they use experts alike.

    Attributes:
      within: mean over pairs of one family; None if there is no pair.
      between: mean over pairs of different families; None if there is no pair.
      families: family -> family -> mean over the pairs of languages of the two.
    """

    within: float | None
    between: float | None
    families: dict[str, dict[str, float]]

    @classmethod
    def of(cls, shares: Mapping[str, np.ndarray]) -> FamilyOverlap:
        """Returns the overlaps of languages, given the share [E] of each expert in them."""
        pairs = collections.defaultdict(list)
        for one, other in itertools.combinations(sorted(shares), 2):
            names = tuple(sorted((family(one), family(other))))
            pairs[names].append(float(np.minimum(shares[one], shares[other]).sum()))
        families = collections.defaultdict(dict)
        for (one, other), found in sorted(pairs.items()):
            families[one][other] = families[other][one] = float(np.mean(found))
        within, between = [], []
        for (one, other), found in pairs.items():
            (within if one == other else between).extend(found)
        return cls(_mean(within), _mean(between), dict(families))


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def row_flags(split: str) -> Flags:
    """Returns the flags that choose the rows; `split` is the default of --split."""
    return dict(
        split=string("Part of the data to read: train, dev or test.", split),
        languages=comma_list("Languages to read, such as es,de; default: all.", []),
        max_rows_per_language=integer(
            "Most rows to read of each language, a fixed random choice.", 200, 1
        ),
    )


def choose_rows_by_flags(values: flags.FlagValues, run: Run) -> list[Row]:
    """Returns the rows that the flags choose; ValueError for an unknown split or language."""
    names.check(values.split, readers.SPLITS, f"--split={values.split} is unknown")
    # The input of a run that translates has `rows` and `pack_rows`.
    input_: Any = run.input
    rows = input_.rows(values.split)
    return choose_rows(rows, values.split, values.languages, values.max_rows_per_language)


def use_by_language(
    run: Run, task: Layer, theta: NestedMap, rows: Sequence[Row]
) -> dict[str, dict[str, ExpertUse]]:
    """Returns language -> path of a layer -> the use of its experts for the language's rows.

    The model reads the source and the target of each row in evaluation. Rows that are too long for
    a batch are left out.

    Raises:
      UserError: the model has no experts.
    """
    found: dict[str, dict[str, ExpertUse]] = {}
    done = 0
    run.progress.begin("Experts", "rows", len(rows))

    def count(batch: dict[str, np.ndarray]) -> None:
        nonlocal done
        done += int(batch["target_segments"].max(axis=1).sum())
        run.progress.update(done)

    for language, members in rows_by_language(rows).items():
        batches = _batches(run, members)
        found[language] = expert_use.measure(task, theta, batches, count)
    run.progress.update(len(rows))
    found = {language: use for language, use in found.items() if use}
    if not found:
        raise UserError(
            f"the run of {run.params.name} has no experts, or none of its rows fits a batch"
        )
    return found


def _batches(run: Run, rows: Sequence[Row]) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of the rows that fit, packed as in training, without empty batch rows."""
    input_: Any = run.input
    batches, _ = input_.pack_rows(rows)
    for batch in batches:
        filled = int(np.count_nonzero(batch["target_segments"].any(axis=1)))
        yield {name: values[:filled] for name, values in batch.items()}


# The colors of squares go from none to the full color in so many steps.
_STRENGTHS = 20
# Numbers on squares at least this strong are written in the color for dark squares.
_DARK = 11

_FILES = (
    *(("lingvo_gshard.wings.pages", name) for name in ("reset.css", "base.css")),
    ("lingvo_gshard.tools.experts", "report.css"),
)


def _style() -> str:
    """Returns the style sheet, with a class for each strength of a square's color."""
    strengths = [
        f".s{strength} {{ background: color-mix(in srgb, var(--accent) "
        f"{100 * strength // _STRENGTHS}%, transparent); "
        f"color: var(--{'on-block' if strength >= _DARK else 'ink'}); }}"
        for strength in range(_STRENGTHS + 1)
    ]
    return "\n".join([html_page.join_styles(_FILES), *strengths])


def to_html(record: dict) -> str:
    """Returns the HTML page of a report, as `gshard-experts report --json` writes it."""
    sizes = sorted({layer["num_experts"] for layer in record["layers"]})
    even = " or ".join(f"{100 / size:.3g}" for size in sizes)
    layers = [layer | {"squares": _squares(layer)} for layer in record["layers"]]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(objects.text_beside(__file__, "report.html"))
    body = template.render(record | {"layers": layers, "even": even})
    return html_page.page(f"Experts of {record['experiment']}", _style(), body)


def _squares(layer: dict) -> dict[str, list[tuple[float, int]]]:
    """Returns language -> each expert's share of its tokens, with the strength of the square."""
    shares = {
        language: np.array(found["load"]) / max(sum(found["load"]), 1.0)
        for language, found in layer["languages"].items()
    }
    largest = max(row.max() for row in shares.values()) or 1.0
    return {
        language: [(share, round(share / largest * _STRENGTHS)) for share in row]
        for language, row in shares.items()
    }


_MOST_SHOWN = 3
# The columns of the report after the language.
NUMBERS = ("tokens", "used", "violation", "dropped", "dead", "entropy")
MOST_USED = "most used"

define_flags = maker(
    logdir=LOGDIR,
    **row_flags("test"),
    html="File for an HTML page with maps of experts by language.",
    json=output.json_flag("all numbers"),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    output.check_writable(values, "html")
    with opened(values, console) as run:
        run.check_decoder(Translator)
        rows = choose_rows_by_flags(values, run)
        source = SourceRun.read(run, parts=("theta",))
        use = use_by_language(run, source.trainer.task, source.theta, rows)
    record = {
        "logdir": values.logdir,
        "experiment": run.params.name,
        "step": source.checkpoint.step,
        "split": values.split,
        "rows": len(rows),
        "layers": to_record(use),
        "watched": [
            msgspec.structs.replace(record, by_language={}, by_class={})
            for record in routers_of_run(values.logdir)
            if record.step <= source.checkpoint.step
        ],
    }
    _print(console, record)
    output.write_json(values.json, record)
    if values.html:
        output.write_text(values.html, to_html(record), "html")
    return 0


def to_record(use: dict[str, dict[str, ExpertUse]]) -> list[dict]:
    """Returns the use of each layer's experts, by language and in total, as JSON values."""
    layers = next(iter(use.values()))
    return [
        _layer(path, {language: found[path] for language, found in use.items()}) for path in layers
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


def _print(console: output.Console, record: dict) -> None:
    head = f"{record['experiment']}, step {record['step']:,}: {record['rows']:,} rows of "
    console.print(f"{head}{record['split']}", markup=False)
    for layer in record["layers"]:
        title = f"{layer['path']}: {layer['num_experts']} experts"
        table = make_table("language", right=NUMBERS, title=title, caption=_caption(layer))
        table.add_column(MOST_USED, no_wrap=True)
        for language, found in layer["languages"].items():
            table.add_row(language, *_cells(found))
        if len(layer["languages"]) > 1:
            table.add_section()
            table.add_row("all", *_cells(layer["all"]), style="bold")
        console.print_table(table)


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
