"""The part of docs/planned_and_published.md on published models: its text and tables."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from docs.planned import cells, families, setups
from docs.planned.cells import LORA, TRAINING, Cell
from docs.planned.machines import MACHINES
from docs.planned.models import MODELS, Model
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.importing import weight_specs

TEXT = pathlib.Path(__file__).parent / "page.md"
_BILLION = 1e9

Cells = Mapping[tuple[str, str, str], Cell]


def text(found: Cells) -> str:
    """Returns this part of the page: page.md with a table in place of each `{...}`."""
    planned = [model for model in MODELS if model.is_planned]
    tables = {
        "slices": _slices(planned, found),
        "training": _details(planned, found, TRAINING),
        "lora": _details(planned, found, LORA),
        "generation_64": _details(planned, found, "generation 64"),
        "generation_1": _details(planned, found, "generation 1"),
        "missing": _missing(planned, found),
        "families": _families(),
        "rank": str(setups.RANK),
        "trained_length": f"{setups.TRAINED_LENGTH:,}",
        "generated_length": f"{setups.GENERATED_LENGTH:,}",
        "capacity_factor": str(setups.CAPACITY_FACTOR),
    }
    page = TEXT.read_text(encoding="utf-8")
    for name, content in tables.items():
        page = page.replace(f"{{{name}}}", content)
    return page.rstrip("\n")


@functools.cache
def counts(model: Model) -> tuple[int, int]:
    """Returns the number of weights of a model, and of those that one token uses."""
    params = experiment_of(PublishedConfig.load(model.config))
    total = sum(math.prod(spec.shape) for spec in weight_specs(params).flatten())
    return total, active_parameters(params.task.copy().instantiate())


def _slices(models: Iterable[Model], found: Cells) -> str:
    """Returns the table of parameters, and of the fewest chips for each kind of work."""
    rows = []
    for model in models:
        total, active = (f"{each / _BILLION:.2f}" for each in counts(model))
        parameters = total if total == active else f"{total}, {active}"
        row = [f"[{model.name}](https://huggingface.co/{model.repository})", parameters]
        for machine in MACHINES:
            made = [found.get((model.key, machine.key, work)) for work in _SHORT]
            shown = [_chips(cell) for work, cell in zip(_SHORT, made, strict=True)]
            row.append("/".join(shown))
        rows.append(row)
    return table(("model", "billions", *(machine.name for machine in MACHINES)), rows)


# The order of the works in the table of slices.
_SHORT = (TRAINING, LORA, "generation 64", "generation 1")


def _chips(cell: Cell | None) -> str:
    if cell is None:
        return "?"
    return str(cell.chips) if cell.topology else "-"


def _details(models: Iterable[Model], found: Cells, work: str) -> str:
    """Returns the table of tokens per second and price of each model on each machine."""
    rows = [
        (model.name, *(_speed(found.get((model.key, each.key, work))) for each in MACHINES))
        for model in models
    ]
    return table(("model", *(machine.name for machine in MACHINES)), rows)


def _speed(cell: Cell | None) -> str:
    if cell is None or not cell.topology:
        return _chips(cell)
    shown = large(cell.tokens_per_second)
    return shown if cell.price is None else f"{shown} ({cell.price:,.0f})"


def _families() -> str:
    """Returns the table of the newest families: bytes, time and MFU on each machine."""
    found = families.load()
    rows = []
    for family in families.FAMILIES:
        made = [found[family.key, machine, families.WORK] for machine in families.MACHINES]
        shown = [f"{x.peak / 1e9:.0f}, {1e3 * x.seconds:.0f}, {x.mfu:.0%}" for x in made]
        rows.append((f"{family.name}, {family.layers}/{family.depth}", *shown))
    return table(("model, layers", "eight H100", "eight v5p"), rows)


def _missing(models: Sequence[Model], found: Cells) -> str:
    """Returns a sentence on the cells that were not planned."""
    wanted = [(m.key, x.key, work) for m in models for x in MACHINES for work in cells.WORKS]
    left = [key for key in wanted if key not in found]
    if not left:
        return f"All {len(wanted)} cells are planned."
    by_machine = {
        f"{machine.name}: {work}": count
        for machine in MACHINES
        for work in cells.WORKS
        if (count := sum(key[1:] == (machine.key, work) for key in left))
    }
    shown = ", ".join(f"{name} ({count} models)" for name, count in by_machine.items())
    return f"{len(wanted) - len(left)} of {len(wanted)} cells are planned. Missing are {shown}."


def large(value: float) -> str:
    """Returns a number without decimals, with thousands separators."""
    return f"{value:,.0f}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown; short rows are filled up with empty cells."""
    padded = [[*line, *[""] * (len(heading) - len(line))] for line in (heading, *rows)]
    first, *others = (f"| {' | '.join(line)} |" for line in padded)
    return "\n".join([first, "|---" * len(heading) + "|", *others])
