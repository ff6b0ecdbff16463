"""Cells: what the table says of one model on one machine for one kind of work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from docs.planned import setups
from docs.planned.machines import Machine
from docs.planned.models import Model
from docs.planned.setups import Setup
from lingvo_gshard.wings.planning.compiling.compilation import TooLargeError
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.roofline import Budget

RESULTS = pathlib.Path(__file__).parent / "results.jsonl"
TRAINING, LORA = "training", "LoRA"
WORKS = (TRAINING, "generation 64", "generation 1", LORA)
TRAINED = (TRAINING, LORA)
BILLION = 1e9


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell.

    Attributes:
      model: key of the model.
      machine: key of the machine.
      work: one of WORKS.
      topology: the smallest slice that it fits on; empty if none.
      devices: its devices.
      chips: its chips.
      mesh: axes and sizes.
      strategy: name or table.
      tokens: tokens of a step, of all devices.
      peak: bytes of a device.
      capacity: bytes that a program may use.
      seconds: of a training step, or between two tokens of a text.
      mfu: model FLOPs utilization.
      tokens_per_second: of all devices.
      price: USD for a billion tokens; None if no price is published.
      compiler: "tpu" or "gpu".
      bounded_by: what bounds generation; empty for training.
      too_small: slices that were compiled and did not fit.
      rejected: slices whose compiler ended with an error.
      reason: why there is no slice.
      made_in: seconds that the cell took.
    """

    model: str
    machine: str
    work: str
    topology: str = ""
    devices: int = 0
    chips: int = 0
    mesh: str = ""
    strategy: str = ""
    tokens: int = 0
    peak: int = 0
    capacity: int = 0
    seconds: float = 0.0
    mfu: float = 0.0
    tokens_per_second: float = 0.0
    price: float | None = None
    compiler: str = ""
    bounded_by: str = ""
    too_small: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    reason: str = ""
    made_in: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What the cell is about."""
        return self.model, self.machine, self.work


_Cell = TypeVar("_Cell", bound=Cell)


def load() -> dict[tuple[str, str, str], Cell]:
    """Returns the cells by what they are about; none without a file."""
    return read(RESULTS, Cell)


def read(path: pathlib.Path, kind: type[_Cell]) -> dict[tuple[str, str, str], _Cell]:
    """Returns the cells of a file by what they are about; none without a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [msgspec.json.decode(line, type=kind) for line in lines]
    return {cell.key: cell for cell in cells}


def save(cells: Iterable[Cell], path: pathlib.Path = RESULTS) -> None:
    """Writes cells to a file, one a line, in order of what they are about."""
    lines = [msgspec.json.encode(cell).decode() for cell in sorted(cells, key=lambda c: c.key)]
    text = "".join(f"{json.dumps(json.loads(line))}\n" for line in lines)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def make(model: Model, machine: Machine, work: str, say: Callable[[str], None] = print) -> Cell:
    """Returns a cell: plans upward from the smallest slice that may fit."""
    started = time.monotonic()
    too_small: list[str] = []
    rejected: list[str] = []
    about = {"model": model.key, "machine": machine.key, "work": work}
    least = 0.0
    for name in machine.topologies:
        topology = topologies.get(name)
        setups_here = _setups(model, topology, work)
        least = setups_here[0].fills
        if least > 1:
            continue
        try:
            cell = _first_that_fits(Cell(**about), setups_here, topology, work, say)
        except ValueError as error:
            say(_sentence(str(error)))
            rejected.append(name)
            continue
        if cell is not None:
            tried = {"too_small": tuple(too_small), "rejected": tuple(rejected)}
            seconds = round(time.monotonic() - started, 1)
            return msgspec.structs.replace(cell, **tried, made_in=seconds)
        too_small.append(name)
    reason = f"even {machine.topologies[-1]} would be {least:.0%} full before any activation"
    if too_small or rejected:
        reason = "no larger slice is listed"
    return Cell(**about, too_small=tuple(too_small), rejected=tuple(rejected), reason=reason)


def _setups(model: Model, topology: Topology, work: str) -> list[Setup]:
    """Returns the setups to try on a slice, in this order."""
    if work in TRAINED:
        return [setups.training(model, topology, setups.RANK if work == LORA else 0)]
    return setups.generation(model, topology, int(work.split()[1]))


def _first_that_fits(
    cell: Cell,
    tried: Sequence[Setup],
    topology: Topology,
    work: str,
    say: Callable[[str], None],
) -> Cell | None:
    """Returns the cell of the first setup that fits on a slice; None if none does."""
    for setup in tried:
        say(f"{cell.model}, {work}: {topology.name}, {setup.mesh}")
        with contextlib.suppress(TooLargeError):
            found = _planned(cell, setup, topology, work)
            if found is not None:
                return found
    return None


def _planned(cell: Cell, setup: Setup, topology: Topology, work: str) -> Cell | None:
    """Returns the cell of one slice; None if the work does not fit on it."""
    options = PlanOptions(mesh=setup.mesh, strategy=setup.strategy, tokens=BILLION)
    if work in TRAINED:
        plan = plan_experiment(setup.params, topology, options)
        assert plan.budget
        facts = facts_of(plan, plan.budget, topology)
        fits = plan.fits
    else:
        asked = GenerationOptions(batch=int(work.split()[1]), has_prefill=False)
        found = plan_generation(setup.params, topology, options, asked)
        # A cost of a million tokens.
        cost = dataclasses.replace(
            found.generated,
            price=None if found.generated.price is None else 1000 * found.generated.price,
        )
        facts = facts_of(found.step, cost, topology) | {
            "seconds": found.seconds_per_token,
            "tokens": found.batch,
            "bounded_by": found.bounded_by,
        }
        fits = found.fits
    facts |= {"mesh": setup.mesh, "strategy": setup.strategy}
    return msgspec.structs.replace(cell, **facts) if fits else None


def facts_of(plan: Plan, cost: Budget, topology: Topology) -> dict[str, object]:
    """Returns what a cell says of a plan, by its attributes."""
    return {
        "topology": topology.name,
        "devices": plan.devices,
        "chips": topology.chips,
        "tokens": plan.tokens_per_step,
        "peak": plan.bytes_per_device.peak,
        "capacity": plan.bytes_per_device.capacity,
        "seconds": plan.seconds_per_step,
        "mfu": plan.mfu,
        "tokens_per_second": plan.tokens_per_second,
        "price": cost.price,
        "compiler": plan.compiler,
    }


def _sentence(message: str) -> str:
    """Returns the first line of a message, at most 300 characters of it."""
    return message.strip().splitlines()[0][:300]
