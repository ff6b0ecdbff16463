"""Rates a plan under the loads that routers had: time, dropped tokens, buffers and placement.

Devices wait for one another in every layer with experts, at the all-to-all that brings the outputs
back. So the slowest device of each layer determines the time of the layer.

- With a dropless dispatch, a device computes the rows that it gets. The plan estimates the time of
  the experts for even loads. The rating multiplies this time by a ratio: the rows that the slowest
  device computes over the rows that the plan counts. Each further round for rows over the bound
  takes one more exchange.
- With buffers, all capacity slots are computed, full or empty. The loads then change the number of
  dropped tokens and not the time. The time of the experts and of their all-to-all grows with the
  slots. The rating scales this time to estimate a step whose buffers drop nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import OPTIMIZER_SCOPE, Options, UserError, names, option
from lingvo_gshard.layers import MixtureOfExperts
from lingvo_gshard.wings.planning.loads import file
from lingvo_gshard.wings.planning.loads.devices import EMPTY, least_largest, place, rows_by_device
from lingvo_gshard.wings.planning.loads.file import (
    LayerLoads,
    LayerRecords,
    Loads,
    Quantiles,
    RouterLoads,
)
from lingvo_gshard.wings.planning.loads.layers import ExpertLayer
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.services.routers.router_records import RouterRecord

_MOST_NAMED = 3


def notes(loads: Loads, layers: Sequence[LayerRecords], replicas: int) -> list[str]:
    """Returns the notes."""
    found = []
    if loads.is_measured:
        found.append(
            f"loads: {loads.path} has no watched steps (run.routers.every_steps), so that the "
            "loads are those of its test rows: one load for all quantiles, dropped tokens as there"
        )
    fixed = [rows for rows in layers if not rows.layer.is_dropless]
    if fixed:
        found.append(
            f"loads: all capacity slots of {_paths(fixed)} are computed, full or empty: loads "
            "decide what is dropped, and neither they nor a placement change the time"
        )
    others = [rows for rows in layers if not (loads.is_measured or rows.has_same_groups)]
    if others:
        record, layer = others[0].records[0], others[0].layer
        found.append(
            f"loads: {_paths(others)} have other groups than in the file ({record.groups:,} of "
            f"{record.group_size:,} tokens there, {layer.groups * layer.micro_batches:,} of "
            f"{layer.group_size:,} here): loads are scaled, and capacities that suffice are a guess"
        )
    unknown = [rows for rows in layers if rows.layer.is_dropless and rows.sent is None]
    if unknown:
        found.append(
            f"loads: {_paths(unknown)}: the file does not tell which of the planned devices sends "
            "which rows, so that sufficient bounds are unknown"
        )
    if any(rows.layer.micro_batches > 1 for rows in layers):
        found.append(
            "loads: loads are means over the micro-batches of a step; single ones are less even"
        )
    if replicas:
        found.append("loads: a run has one copy of each expert; replicas are planned only")
    return found


def _paths(layers: Sequence[LayerRecords]) -> str:
    paths = [rows.layer.path for rows in layers]
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return ", ".join(paths[:_MOST_NAMED]) + more


_EXPERTS = "experts"
_EXCHANGES, _GATHERED = ("all-to-all", "ragged-all-to-all"), ("all-gather", "reduce-scatter")
_EXPERT_LETTER = "E"


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """The plan's estimates for one layer with experts, of one device in one step.

    Attributes:
      experts: time of the experts' arithmetic, forward, rematerialized and backward.
      exchange: time of the exchange between groups and experts.
    """

    experts: float
    exchange: float
    bytes_per_expert: int

    @classmethod
    def of(cls, plan: Plan, layer: ExpertLayer) -> LayerSeconds:
        """Returns what a plan says of a layer. Layers of one loop have equal shares of its time."""
        scope = f"{layer.scope}/{_EXPERTS}"
        rows = [row for row in plan.layers if _is_in(row.layer, scope)]
        # Weights that are gathered, and gradients that are summed, do not depend on the rows.
        others = [row for row in plan.collectives if _is_in(row.layer, scope)]
        experts = sum(row.seconds for row in rows if row.phase != OPTIMIZER_SCOPE)
        experts -= sum(row.seconds for row in others if row.phase != OPTIMIZER_SCOPE)
        kinds = _GATHERED if layer.is_gathered else _EXCHANGES
        exchange = sum(
            row.seconds
            for row in plan.collectives
            if row.kind.startswith(kinds)
            and _is_in(row.layer, layer.scope)
            and not (layer.is_gathered and _is_in(row.layer, scope))
        )
        weights = sum(
            row.bytes
            for row in plan.tensors
            if row.kind == "weights" and _is_in(row.layer, scope) and _EXPERT_LETTER in row.layout
        )
        return cls(
            max(experts, 0.0) / layer.times,
            exchange / layer.times,
            weights // (layer.times * layer.num_experts),
        )


def _is_in(layer: str, scope: str) -> bool:
    return layer == scope or layer.startswith(f"{scope}/")


def rate(plan: Plan, layers: Sequence[ExpertLayer], loads: Loads, replicas: int = 0) -> RouterLoads:
    """Returns what a planned step takes under the loads of routers.

    Args:
      plan: the plan of the step, for even loads.
      replicas: further copies of experts that the placement has in each layer.
    """
    rated = [
        _RatedLayer(
            LayerRecords(layer, loads.layers[layer.path]), LayerSeconds.of(plan, layer), replicas
        )
        for layer in layers
    ]
    requests = np.sum([each.rows.choices.sum(1) for each in rated], 0)
    dropped = _sum_if_known([each.dropped for each in rated])
    base = plan.seconds_per_step
    has_limits = any(layer.limits for layer in layers)
    enough = _sum_if_known([each.extra_if_sufficient for each in rated]) if has_limits else None
    steps = loads.steps
    return RouterLoads(
        path=loads.path,
        steps=len(steps),
        first_step=steps[0],
        last_step=steps[-1],
        step_seconds=_quantiles(base + np.sum([each.extra(each.given) for each in rated], 0)),
        step_seconds_placed=_quantiles(
            base + np.sum([each.extra(each.placed) for each in rated], 0)
        ),
        step_seconds_dropping_nothing=None if enough is None else _quantiles(base + enough),
        dropped_share=None if dropped is None else _quantiles(dropped / requests),
        layers=[each.record() for each in rated],
        replica_bytes=sum(each.replica_bytes for each in rated),
        notes=notes(loads, [each.rows for each in rated], replicas),
    )


@dataclasses.dataclass(frozen=True)
class _RatedLayer:
    """One layer under its loads. T is the number of steps."""

    rows: LayerRecords
    seconds: LayerSeconds
    replicas: int

    @property
    def given(self) -> np.ndarray:
        """The experts of each device as a run has them."""
        return self.rows.layer.devices.contiguous()

    @functools.cached_property
    def placed(self) -> np.ndarray:
        """The experts of each device that are found for the loads of all steps."""
        return self.place(self.rows.choices.sum(0))

    def place(self, load: np.ndarray) -> np.ndarray:
        """Returns the experts of each device for a load [E].

        Without replicas, experts stay as a run has them unless a move lowers the largest load.
        """
        devices = self.rows.layer.devices
        if devices.parts == 1:
            return self.given
        found = place(load, devices.parts, self.replicas)
        if self.replicas or _largest(load, found) < _largest(load, self.given):
            return found
        return self.given

    def extra(self, placement: np.ndarray) -> np.ndarray:
        """Returns the seconds, [T], that the loads add to the time of a step."""
        if not self.rows.layer.is_dropless:
            return np.zeros(len(self.rows.records))
        experts = self.seconds.experts * (self.rows.computed(placement) - 1.0)
        return experts + self.seconds.exchange * self.rows.further_rounds(placement)

    @property
    def extra_if_sufficient(self) -> np.ndarray | None:
        """Seconds, [T], that loads add to a step whose capacity drops nothing; None if unknown."""
        layer = self.rows.layer
        if not layer.limits:
            return self.extra(self.given)
        slots = self.rows.sufficient_slots()
        if slots is None:
            return None
        return (self.seconds.experts + self.seconds.exchange) * (slots / layer.capacity - 1.0)

    @property
    def dropped(self) -> np.ndarray | None:
        """The number of dropped rows, [T]; None if it is unknown."""
        return self.rows.dropped(self.given)

    @property
    def replica_bytes(self) -> int:
        """Weights that the device with the most experts has in addition to its own."""
        if not self.replicas or self.rows.layer.devices.parts == 1:
            return 0
        most = int((self.placed != EMPTY).sum(1).max())
        return (most - self.given.shape[1]) * self.seconds.bytes_per_expert

    def record(self) -> LayerLoads:
        """Returns the numbers of the layer."""
        layer, rows = self.rows.layer, self.rows
        load, parts = rows.choices.sum(0), layer.devices.parts
        placed, requests = self.placed, rows.choices.sum(1)
        later, later_placed = self._later()
        has_copies = bool(self.replicas) and parts > 1
        least = least_largest(load, parts, self.replicas)
        experts = self.seconds.experts
        dropped = self.dropped
        return LayerLoads(
            layer=layer.path,
            router=layer.router,
            dispatch=layer.dispatch,
            experts=layer.num_experts,
            devices=parts,
            busiest_expert=int(load.argmax()),
            busiest_over_mean=float(load.max() / load.mean()),
            slowest=_quantiles(rows.slowest(self.given)),
            slowest_device=int(_of_devices(load, self.given).argmax()),
            placement=[part[part != EMPTY].tolist() for part in placed],
            replicas=self.replicas if has_copies else 0,
            placed=_quantiles(rows.slowest(placed)),
            gap=_largest(load, placed) / least - 1.0,
            later=later,
            later_placed=later_placed,
            dropped_share=None if dropped is None else _quantiles(dropped / requests),
            capacity=layer.capacity if layer.limits else None,
            capacity_factor=layer.capacity_factor(layer.capacity) if layer.limits else None,
            sufficient_factor=_quantiles_or_none(rows.sufficient_factor()),
            bound=layer.bound if layer.is_dropless else None,
            sufficient_bound=_quantiles_or_none(rows.sufficient_bound(self.given)),
            placed_bound=None if has_copies else _quantiles_or_none(rows.sufficient_bound(placed)),
            experts_seconds=experts,
            seconds=_quantiles(experts + self.extra(self.given)),
            seconds_placed=_quantiles(experts + self.extra(placed)),
        )

    def _later(self) -> tuple[float | None, float | None]:
        """Returns LayerLoads.later and later_placed."""
        half = len(self.rows.records) // 2
        if not half:
            return None, None
        earlier = self.place(self.rows.choices[:half].sum(0))
        given, placed = (self.rows.slowest(each)[half:].mean() for each in (self.given, earlier))
        return float(given), float(placed)


def _of_devices(load: np.ndarray, placement: np.ndarray) -> np.ndarray:
    return rows_by_device(load, placement).sum(-1)


def _largest(load: np.ndarray, placement: np.ndarray) -> float:
    return float(_of_devices(load, placement).max())


def _sum_if_known(terms: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the sum of numbers by step; None if one of them is unknown."""
    known = [term for term in terms if term is not None]
    return np.sum(known, 0) if len(known) == len(terms) else None


def _quantiles_or_none(values: np.ndarray | None) -> Quantiles | None:
    return None if values is None else _quantiles(values)


def _quantiles(values: np.ndarray) -> Quantiles:
    at = np.quantile(values, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
    return Quantiles(float(values.mean()), *map(float, at))


def check_model(loads: Loads, layers: Mapping[str, MixtureOfExperts], name: str) -> None:
    """Raises ValueError that names the layer and the counts if loads are of another model."""
    where = f"`loads={loads.path}`"
    if not layers:
        raise UserError(f"{where}: {name} has no layer with experts")
    counts = (
        f"{name} has {_count(len(layers), 'layer')} with experts, the file {len(loads.layers)}: "
        "are they of another model?"
    )
    for path in loads.layers:
        if path not in layers:
            raise UserError(
                f"{where} has loads of {path}, which is no layer with experts of {name}. "
                f"{names.nearest(path, layers)} {counts}"
            )
    for path, layer in layers.items():
        if path not in loads.layers:
            raise UserError(f"{where} has no loads of {path}. {counts}")
        _check_layer(where, loads.layers[path][0], layer, name)


def check_replicas(replicas: int, layers: Sequence[ExpertLayer]) -> None:
    """Raises ValueError if an expert would have more copies than there are devices."""
    for layer in layers:
        parts, experts = layer.devices.parts, layer.num_experts
        if replicas > experts * (parts - 1):
            raise UserError(
                f"`replicas={replicas}`: the {experts:,} experts of {layer.path} are divided over "
                f"{_count(parts, 'device')}; expected at most {experts * (parts - 1):,}, which is "
                "every expert on every device"
            )


def _check_layer(where: str, record: RouterRecord, layer: MixtureOfExperts, name: str) -> None:
    experts = layer.p.num_experts
    if record.num_experts != experts:
        raise UserError(
            f"{where} has loads of {_count(record.num_experts, 'expert')} in {record.layer}, where "
            f"{name} has {experts}: expected the loads of the same model"
        )
    each = float(layer.router.experts_per_token(layer.router.p))
    if record.experts_per_token not in (0.0, each):
        raise UserError(
            f"{where} has loads of {record.experts_per_token:g} experts per token in "
            f"{record.layer} ({record.router}), where {name} has {each:g} "
            f"({type(layer.router).__name__}): expected the loads of the same router"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class LoadsOptions(Options):
    """Options for a plan's loads. Without a file it takes even loads only."""

    loads: str | None = option(
        None,
        "Loads that the routers of a run had, to plan with: a file of gshard-experts report --json "
        "or of gshard-experts watched --json, or the run's routers.jsonl. The plan then says which "
        "device is the slowest, what is dropped, and how to place experts.",
    )
    loads_from: int = option(
        0, "First step of `loads` to take; those before it are left out.", minimum=0
    )
    replicas: int = option(
        0, "Further copies of experts in each layer that the placement for `loads` has.", minimum=0
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("loads_from", "replicas"):
            value = getattr(self, name)
            if value and self.loads is None:
                raise UserError(f"`{name}={value}` applies to `loads`, which is not given")

    def read(self) -> Loads | None:
        """Returns the loads in the file; None without a file. Raises UserError for a wrong one."""
        return None if self.loads is None else file.load(self.loads, self.loads_from)
