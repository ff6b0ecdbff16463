"""What may make a step fit that does not: changes tried by planning again with them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator

from absl import flags

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan, Row

PlanExperiment = Callable[[flags.FlagValues, Params, Topology], Plan]

_REMATERIALizED = "full"
_SPLIT_WEIGHTS = "fsdp"


@dataclasses.dataclass(frozen=True)
class Change:
    """Something else to set: hyperparameters by path, or the strategy."""

    params: dict[str, object] = dataclasses.field(default_factory=dict)
    strategy: str = ""

    def __str__(self) -> str:
        strategy = [f"--strategy={self.strategy}"] if self.strategy else []
        settings = [f"{path} = {json.dumps(value)}" for path, value in self.params.items()]
        return " ".join([*strategy, *(f"--gin_param='{setting}'" for setting in settings)])


class Remedies:
    """Changes that may make an experiment's step fit, each tried on top of those before it."""

    def __init__(
        self, values: flags.FlagValues, params: Params, topology: Topology, plan: PlanExperiment
    ):
        self._values, self._params, self._topology = copy.deepcopy(values), params.copy(), topology
        self._plan = plan

    def until_one_fits(self, most: int, say: Callable[[str], None]) -> list[Row]:
        """Returns a row for each change tried: it and those before it, fits, peak, seconds.

        say: is told what is tried next.
        """
        rows: list[Row] = []
        made: list[str] = []
        for _, change in zip(range(most), self._changes(), strict=False):
            made.append(str(change))
            say(f"it does not fit; trying {made[-1]}")
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
        yield from self._for_stacks("rematerialize", lambda stack: _REMATERIALizED)
        strategy = self._values.strategy or self._params.sharding.strategy or "expert"
        if "->" not in strategy and _SPLIT_WEIGHTS not in strategy.split("_"):
            yield Change(strategy=f"{strategy}_{_SPLIT_WEIGHTS}")
        if self._params.trainer.precision == "float32":
            yield Change({"trainer.precision": "bfloat16"})
        while self._params.input.batch_rows >= 2 * self._topology.devices:
            yield Change({"input.batch_rows": self._params.input.batch_rows // 2})
        yield from self._for_stacks("moe.router.capacity_factor", _least_capacity)

    def _for_stacks(self, path: str, value: Callable[[Params], object]) -> Iterator[Change]:
        """One change of what all stacks have, where they have it otherwise."""
        settings = {}
        for name in ("encoder", "decoder"):
            # A language model has a decoder alone.
            if name not in self._params.task:
                continue
            stack = self._params.task.get(name)
            has_buffers = "moe" not in path or _limits_experts(stack)
            if has_buffers and stack.get(path) != value(stack):
                settings[f"task.{name}.{path}"] = value(stack)
        if settings:
            yield Change(settings)

    def _make(self, change: Change) -> None:
        for path, value in change.params.items():
            self._params.set_path(path, value)
        if change.strategy:
            self._values.strategy = change.strategy


def _limits_experts(stack: Params) -> bool:
    """Whether it has experts that drop tokens when their buffers are full."""
    if not (stack.moe_every and "router" in stack.moe) or stack.moe.dispatch == "dropless":
        return False
    return "capacity_factor" in stack.moe.router


def _least_capacity(stack: Params) -> float:
    return min(stack.moe.router.capacity_factor or 0.5, 0.5)
