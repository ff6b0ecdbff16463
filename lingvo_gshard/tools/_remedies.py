"""What may make a step fit that does not: changes tried by planning again with them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator

import rich.console
from absl import flags

from lingvo_gshard.core.params import Params
from lingvo_gshard.planning.plan import Plan, Row
from lingvo_gshard.planning.topologies import Topology

PlanExperiment = Callable[[flags.FlagValues, Params, Topology], Plan]

_REMATERIALISED = "full"
_SPLIT_WEIGHTS = "fsdp"


@dataclasses.dataclass(frozen=True)
class Change:
    """Something else to set: hyperparameters by path, or the strategy."""

    params: dict[str, object] = dataclasses.field(default_factory=dict)
    strategy: str = ""

    def __str__(self) -> str:
        settings = [f"--gin_param='{path} = {json.dumps(value)}'" for path, value in self.params.items()]
        return " ".join([*([f"--strategy={self.strategy}"] if self.strategy else []), *settings])


class Remedies:
    """Changes that may make an experiment's step fit, each tried on top of those before it."""

    def __init__(
        self, values: flags.FlagValues, params: Params, topology: Topology, plan: PlanExperiment
    ):
        self._values, self._params, self._topology = copy.deepcopy(values), params.copy(), topology
        self._plan = plan

    def until_one_fits(self, most: int, console: rich.console.Console) -> list[Row]:
        """Returns a row for each change tried: it and those before it, fits, peak, seconds."""
        rows: list[Row] = []
        made: list[str] = []
        for _, change in zip(range(most), self._changes(), strict=False):
            made.append(str(change))
            console.print(f"It does not fit; trying {made[-1]}", markup=False, highlight=False)
            self._make(change)
            row = {"change": " ".join(made), "fits": False, "peak": None, "seconds_per_step": None}
            try:
                plan = self._plan(self._values, self._params, self._topology)
            except ValueError as error:
                rows.append({**row, "reason": str(error)})
                continue
            row.update(
                fits=plan.fits,
                peak=plan.bytes_per_device["peak"],
                seconds_per_step=plan.seconds_per_step,
            )
            rows.append(row)
            if plan.fits:
                break
        return rows

    def _changes(self) -> Iterator[Change]:
        """What there is to change, the least loss of speed or quality first."""
        yield from self._for_stacks("rematerialise", lambda stack: _REMATERIALISED)
        strategy = self._values.strategy or self._params.sharding.strategy or "expert"
        if "->" not in strategy and _SPLIT_WEIGHTS not in strategy.split("_"):
            yield Change(strategy=f"{strategy}_{_SPLIT_WEIGHTS}")
        if self._params.task.fprop_dtype == "float32":
            yield Change({"task.fprop_dtype": "bfloat16"})
        while self._params.input.batch_rows >= 2 * self._topology.devices:
            yield Change({"input.batch_rows": self._params.input.batch_rows // 2})
        yield from self._for_stacks("moe.router.capacity_factor", lambda stack: 1.0)

    def _for_stacks(self, path: str, value: Callable[[Params], object]) -> Iterator[Change]:
        """One change of what both stacks have, where they have it otherwise."""
        settings = {}
        for name in ("encoder", "decoder"):
            stack = self._params.task.get(name)
            has_experts = "moe" not in path or (stack.moe_every and "router" in stack.moe)
            if has_experts and stack.get(path) != value(stack):
                settings[f"task.{name}.{path}"] = value(stack)
        if settings:
            yield Change(settings)

    def _make(self, change: Change) -> None:
        for path, value in change.params.items():
            self._params.set_path(path, value)
        if change.strategy:
            self._values.strategy = change.strategy
