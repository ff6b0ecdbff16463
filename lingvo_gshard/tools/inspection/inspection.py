"""What gshard-inspect finds out: how a trainer's state is split, and what its step compiles to."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Iterable, Sequence

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, scope_name
from lingvo_gshard.hlo import summary
from lingvo_gshard.layers.stacks import pipeline
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.program.step_programs import eval_program, init_program, train_program
from lingvo_gshard.sharding import replication
from lingvo_gshard.sharding.listing import WeightRow, weight_rows
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.replication import Replicated
from lingvo_gshard.training.experiments import batch_specs
from lingvo_gshard.training.optim import optimizer
from lingvo_gshard.training.trainer import Trainer

FUNCTIONS = ("train_step", "eval_step", "init_state")
FORWARD, BACKWARD, OPTIMIZER, NO_PASS = "forward", "backward", optimizer.SCOPE, ""
PASSES = (FORWARD, BACKWARD, OPTIMIZER, NO_PASS)
SEVERAL_LAYERS = "several layers"
NO_LAYER = "outside of layers"
_BACKWARD_SCOPE = "gradient_tape/"


@dataclasses.dataclass(frozen=True)
class Split:
    """How the weights and moments are kept, and what of them is whole although it might be
    split."""

    weights: list[WeightRow]
    moments: list[WeightRow]
    whole_weights: list[Replicated]
    whole_moments: list[Replicated]


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind in one layer and pass: how many, and the bytes of their results.

    layer: a path; SEVERAL_LAYERS where XLA made one collective of those of layers that have no
        layer around them all, NO_LAYER for those of names that tell no layer.
    pass_: FORWARD, BACKWARD, OPTIMIZER, or NO_PASS where neither is told.
    bytes: on each device.
    """

    layer: str
    pass_: str
    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function: seconds it took, bytes per device, collectives, what was made whole."""

    name: str
    seconds: float
    memory: dict[str, int]
    collectives: list[CollectiveRow]
    rematerializations: list[summary.Rematerialization]


def pipelines(trainer: Trainer) -> list[dict]:
    """Returns, for every pipeline of a trainer's task, its schedule and how idle its stages are."""
    return [
        {
            "layer": layer.path,
            **dataclasses.asdict(layer.schedule),
            "ticks": layer.schedule.ticks,
            "idle_share": layer.schedule.idle_share,
        }
        for layer in pipeline.pipelines(trainer.task)
    ]


def split(trainer: Trainer, partitioning: Partitioning) -> Split:
    """Returns how a trainer's state is split."""
    specs = trainer.state_specs()
    weights, moments = specs.theta.flatten(), specs.moments.flatten()
    return Split(
        weights=weight_rows(weights, partitioning),
        moments=weight_rows(moments, partitioning, "moments"),
        whole_weights=replication.replicated(weights, partitioning),
        whole_moments=replication.replicated(moments, partitioning, "moments"),
    )


def check_replicated(found: Split, most_megabytes: float | None) -> None:
    """Raises ValueError naming --max_replicated_mb if more is whole; None: anything goes."""
    if most_megabytes is not None:
        whole = [*found.whole_weights, *found.whole_moments]
        replication.check_replicated(whole, most_megabytes)


def lower(
    function: str, params: Params, trainer: Trainer, partitioning: Partitioning, partitioner: str
) -> Program:
    """Returns one of FUNCTIONS as a program."""
    if function == "init_state":
        return init_program(trainer, partitioning, partitioner)
    make = {"train_step": train_program, "eval_step": eval_program}[function]
    return make(trainer, partitioning, partitioner, batch_specs(params))[0]


def compile_program(program: Program, task: Layer) -> Compiled:
    """Compiles a program for CPU devices, as many as its mesh needs."""
    devices = devices_for(program.mesh.size)
    started = time.monotonic()
    executable = Executable(program, devices)
    seconds = time.monotonic() - started
    return Compiled(
        name=program.name,
        seconds=seconds,
        memory=executable.memory(),
        collectives=by_layer(executable.collectives(), task.layer_paths()),
        rematerializations=executable.rematerializations(),
    )


def by_layer(found: Sequence[summary.Collective], paths: Sequence[str]) -> list[CollectiveRow]:
    """Returns the collectives summed by layer, pass and kind: the layers in order, in each pass."""
    scopes = {scope_name(path): path for path in paths if path}
    counts: collections.Counter[tuple] = collections.Counter()
    sizes: collections.Counter[tuple] = collections.Counter()
    for collective in found:
        layer = _layer(collective.operation, scopes)
        key = (layer, _pass(collective.operation, layer), collective.kind)
        counts[key] += 1
        sizes[key] += collective.bytes
    order = [*paths, SEVERAL_LAYERS, NO_LAYER]
    rows = [CollectiveRow(*key, counts[key], sizes[key]) for key in counts]
    return sorted(rows, key=lambda r: (PASSES.index(r.pass_), order.index(r.layer), r.kind))


def total_by_kind(rows: Iterable[CollectiveRow]) -> dict[str, tuple[int, int]]:
    """Returns kind -> (count, bytes), sorted by kind."""
    totals: dict[str, tuple[int, int]] = {}
    for row in sorted(rows, key=lambda row: row.kind):
        count, size = totals.get(row.kind, (0, 0))
        totals[row.kind] = (count + row.count, size + row.bytes)
    return totals


def split_record(partitioning: Partitioning, found: Split, with_moments: bool) -> dict:
    """Returns a split as JSON values."""
    record = {
        "mesh": str(partitioning.mesh),
        "strategy": partitioning.strategy.name,
        "table": partitioning.strategy.to_text(),
        "overrides": {pattern: table.to_text() for pattern, table in partitioning.overrides},
        "unused_axes": list(partitioning.unused_axes),
    }
    for kind, rows in (("weights", found.weights), ("moments", found.moments)):
        record[f"{kind}_bytes"] = sum(row.bytes for row in rows)
        record[f"{kind}_bytes_per_device"] = sum(row.bytes_per_device for row in rows)
    whole = found.whole_weights + (found.whole_moments if with_moments else [])
    record["held_whole"] = [dataclasses.asdict(row) for row in whole]
    record["weights"] = [dataclasses.asdict(row) for row in found.weights]
    if with_moments:
        record["moments"] = [dataclasses.asdict(row) for row in found.moments]
    return record


def compiled_record(compiled: Compiled) -> dict:
    """Returns what was compiled as JSON values; `pass` is empty where there is no layer."""
    rows = [dataclasses.asdict(row) for row in compiled.collectives]
    return {
        "function": compiled.name,
        "compile_seconds": compiled.seconds,
        "memory_per_device": compiled.memory,
        "collectives": [{key.rstrip("_"): row[key] for key in row} for row in rows],
        "rematerializations": [dataclasses.asdict(row) for row in compiled.rematerializations],
    }


def _layer(operation: str, scopes: dict[str, str]) -> str:
    """The layer of an operation's name; of several operations made one, the layer around all."""
    paths = {_innermost(part, scopes) for part in operation.strip("()").split(":")}
    if len(paths) == 1:
        return paths.pop() or NO_LAYER
    steps = os.path.commonprefix([path.split(".") for path in paths])
    around = ".".join(steps)
    return around if around in scopes.values() else SEVERAL_LAYERS


def _pass(operation: str, layer: str) -> str:
    several = operation[1:-1].split(":") if operation.startswith("(") else [operation]
    if all(name.startswith(f"{OPTIMIZER}/") for name in several):
        return OPTIMIZER
    if layer == NO_LAYER:
        return NO_PASS
    return BACKWARD if _BACKWARD_SCOPE in operation else FORWARD


def _innermost(name: str, scopes: dict[str, str]) -> str:
    """The path of the longest scope in the name of an operation; empty if there is none."""
    found = [scope for scope in scopes if f"/{scope}/" in f"/{name}/"]
    return scopes[max(found, key=len)] if found else ""
