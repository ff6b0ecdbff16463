"""Reads the loads of routers from files and validates them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, explained, objects, random_numbers
from lingvo_gshard.wings.dropless.expert_blocks import BlockSizes
from lingvo_gshard.wings.planning.loads.devices import rows_by_device
from lingvo_gshard.wings.services.routers.router_records import RouterRecord

if TYPE_CHECKING:
    from lingvo_gshard.wings.planning.loads.layers import ExpertLayer


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """The spread of a number over the steps. Every quantile is the number of one of the steps.

    `p50` is the smallest number that half of the steps do not exceed.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    worst: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """The loads of the experts and devices of one layer.

    Attributes:
      devices: number of devices that the experts are divided over.
      busiest_expert: the expert with the most choices in all steps.
      busiest_over_mean: choices of the busiest expert over the mean choices of an expert.
      slowest: rows of the device that gets the most rows, over the mean rows of a device, by step.
      slowest_device: the device that gets the most rows in all steps, as its position along the
        mesh axes of the experts.
      placement: the experts of each device under the placement that was found.
      replicas: further copies of experts that the placement has, on all devices together.
      placed: as `slowest`, under the placement.
      gap: by how much the largest load of a device, over all steps, exceeds the lower bound of any
        placement; 0.01 is 1%.
      later: mean of `slowest` over the later half of the steps; None with a single step.
      later_placed: as `later`, under a placement that was found from the earlier half.
      dropped_share: share of the requests that are dropped, by step; None if the file does not
        tell.
      capacity: capacity slots of an expert for each group; None with a dropless dispatch.
      sufficient_factor: the smallest capacity factor that drops nothing, by step; None if unknown.
      bound: the dropless dispatch's bound, 0 for none; None with another dispatch.
      sufficient_bound: the smallest bound that no row is over, by step; None if unknown.
      placed_bound: as `sufficient_bound`, under the placement; None with replicas, too.
      experts_seconds: the plan's estimate for the experts of this layer.
      seconds: as `experts_seconds`, under the loads, by step.
    """

    layer: str
    router: str
    dispatch: str
    experts: int
    devices: int
    busiest_expert: int
    busiest_over_mean: float
    slowest: Quantiles
    slowest_device: int
    placement: list[list[int]]
    replicas: int
    placed: Quantiles
    gap: float
    later: float | None
    later_placed: float | None
    dropped_share: Quantiles | None
    capacity: int | None
    capacity_factor: float | None
    sufficient_factor: Quantiles | None
    bound: float | None
    sufficient_bound: Quantiles | None
    placed_bound: Quantiles | None
    experts_seconds: float
    seconds: Quantiles
    seconds_placed: Quantiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLoads:
    """A step under the loads that routers had, where a plan takes even loads.

    Attributes:
      step_seconds: time of the step under the loads, by step of the file.
      step_seconds_placed: the same under the placement.
      step_seconds_dropping_nothing: the same with buffers that drop nothing in the step; None if
        no layer has buffers that can be full, or the file does not tell.
      dropped_share: share of all layers' requests that are dropped, by step; None if the file does
        not tell.
      replica_bytes: weights of the copies of experts that the device with the most of them has in
        addition, in all layers.
      notes: what the numbers leave out.
    """

    path: str
    steps: int
    first_step: int
    last_step: int
    step_seconds: Quantiles
    step_seconds_placed: Quantiles
    step_seconds_dropping_nothing: Quantiles | None
    dropped_share: Quantiles | None
    layers: list[LayerLoads]
    replica_bytes: int
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class LayerRecords:
    """The rows of one layer in T steps, scaled to the planned batch.

    All counts are for one micro-batch: the mean over the micro-batches of a step.
    """

    layer: ExpertLayer
    records: Sequence[RouterRecord]

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """[T], tokens of a planned micro-batch over tokens of the recorded step."""
        layer = self.layer
        tokens = [r.groups * r.group_size or sum(r.choices) for r in self.records]
        planned = layer.groups * layer.group_size if self.records[0].groups else layer.rows
        return planned / np.array(tokens, float)

    @functools.cached_property
    def choices(self) -> np.ndarray:
        """[T, E], rows that each expert is asked to compute."""
        counts = np.array([record.choices for record in self.records], float)
        return counts * self.scale[:, None]

    @functools.cached_property
    def has_same_groups(self) -> bool:
        """Whether the planned step has as many groups, of the same size, as all recorded steps."""
        layer = self.layer
        planned = layer.groups * layer.micro_batches, layer.group_size
        return all((r.groups, r.group_size) == planned for r in self.records)

    @functools.cached_property
    def sent(self) -> np.ndarray | None:
        """[T, slices, sources, E], rows that each device sends; None if the file does not tell."""
        layer = self.layer
        even = layer.groups % layer.devices.mesh.parts(layer.devices.group_axes) == 0
        if not self.has_same_groups or not even:
            return None
        found = [layer.devices.by_source(np.array(record.by_part)) for record in self.records]
        if any(rows is None for rows in found):
            return None
        return np.array(found) * self.scale[:, None, None, None]

    @functools.cached_property
    def received(self) -> np.ndarray:
        """[T, slices, E], rows of each expert on the devices of each slice.

        If it is unknown which tokens a slice has, each has an equal share.
        """
        if self.sent is not None:
            return self.sent.sum(2)
        slices = self.layer.devices.slices
        return np.repeat(self.choices[:, None] / slices, slices, 1)

    def slowest(self, placement: np.ndarray) -> np.ndarray:
        """Returns [T]: the rows of the device that gets the most, over the mean of all devices."""
        on_device = rows_by_device(self.received, placement).sum(-1)
        return on_device.max((1, 2)) / on_device.mean((1, 2))

    def dropped(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T]: the rows that are dropped; None if the file does not tell."""
        layer = self.layer
        if layer.is_dropless:
            return self.over_bound(placement) if layer.drops else np.zeros(len(self.records))
        if not layer.limits:
            return np.array([r.dropped_share for r in self.records]) * self.choices.sum(1)
        if not all(record.positions for record in self.records):
            return None
        over = [self._over(record, layer.capacity) for record in self.records]
        return np.array(over) * self.scale

    def over_bound(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T]: the rows over a dropless bound; None if the file does not tell."""
        if not self.layer.bound or self.layer.devices.parts == 1:
            return np.zeros(len(self.records))
        bounded = self._bounded_rows(placement)
        return None if bounded is None else np.maximum(bounded - self.most_rows, 0).sum((1, 2, 3))

    def further_rounds(self, placement: np.ndarray) -> np.ndarray:
        """Returns [T]: the exchanges after the first one for rows over the bound; 0 if unknown."""
        has_rounds = self.layer.bound and not self.layer.drops and self.layer.devices.parts > 1
        bounded = self._bounded_rows(placement) if has_rounds else None
        if bounded is None:
            return np.zeros(len(self.records))
        return np.maximum(np.ceil(bounded.max((1, 2, 3)) / self.most_rows) - 1, 0)

    def sufficient_factor(self) -> np.ndarray | None:
        """Returns [T]: the smallest capacity factor that drops nothing; None if unknown."""
        slots = self.sufficient_slots()
        if slots is None:
            return None
        return np.array([self.layer.capacity_factor(count) for count in slots])

    def sufficient_slots(self) -> np.ndarray | None:
        """Returns [T]: the smallest capacity that drops nothing; None if unknown."""
        if not self.layer.limits or not all(r.positions for r in self.records):
            return None
        # In a larger group, more tokens come before each position.
        size = self.layer.group_size
        needed = (len(r.positions) * (size / r.group_size) for r in self.records)
        return np.array([random_numbers.ceil(slots) for slots in needed])

    def sufficient_bound(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T]: the smallest bound that no row is over; None if unknown."""
        is_exchanged = self.layer.is_dropless and self.layer.devices.parts > 1
        bounded = self._bounded_rows(placement) if is_exchanged else None
        if bounded is None:
            return None
        factor = bounded.max((1, 2, 3)) / self._even_rows
        return np.array([random_numbers.ceil(value * 1e4) / 1e4 for value in factor])

    @property
    def rows_of_device(self) -> int:
        """The rows that the tokens of one device make, padding included."""
        layer = self.layer
        groups = -(-layer.groups // layer.devices.mesh.parts(layer.devices.group_axes))
        return round(groups * layer.group_size * layer.experts_per_token)

    @property
    def most_rows(self) -> int:
        """The rows that the dispatch's bound allows; see `DroplessDispatch`."""
        most = self.rows_of_device * (self.layer.devices.parts if self.layer.is_gathered else 1)
        if not self.layer.bound:
            return most
        return min(random_numbers.ceil(self.layer.bound * self._even_rows), most)

    @property
    def _even_rows(self) -> float:
        """The rows that `most_rows` limits, under balanced loads."""
        return self.rows_of_device / (1 if self.layer.is_gathered else self.layer.devices.parts)

    def computed(self, placement: np.ndarray) -> np.ndarray:
        """Returns [T]: rows that the slowest device computes, over rows that the plan counts.

        A dropless dispatch computes an expert's rows in full blocks and a smaller one
        (`dispatches/dropless.py`). The plan has even loads, and full blocks only.
        """
        parts, places = placement.shape
        slots = self.rows_of_device
        if parts > 1:
            slots = self.most_rows * (1 if self.layer.is_gathered else parts)
        sizes = BlockSizes.for_rows(slots, self.layer.devices.places)
        rows = np.ceil(rows_by_device(self.received, placement))
        full = np.maximum(rows - 1, 0) // sizes.full * sizes.full
        blocks = full + np.ceil((rows - full) / sizes.step) * sizes.step
        slowest = blocks.sum(-1).max((1, 2))
        even = -(-self.rows_of_device // self.layer.devices.places)
        active = min(self.layer.devices.places, self.rows_of_device)
        return slowest / (active * (max(even - 1, 0) // sizes.full + 1) * sizes.full)

    def _bounded_rows(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T, slices, sources, parts]: rows that devices send to each other.

        With a gathered exchange, a bound limits the rows that a device receives from all sources.
        Here they have one source.
        """
        if self.sent is None:
            return None
        rows = rows_by_device(self.sent, placement).sum(-1)
        return rows.sum(2, keepdims=True) if self.layer.is_gathered else rows

    def _over(self, record: RouterRecord, capacity: int) -> float:
        """Returns the recorded requests that are dropped with a capacity."""
        ratio = self.layer.group_size / record.group_size
        position = np.ceil((np.arange(len(record.positions)) + 1) * ratio)
        return float(np.array(record.positions)[position > capacity].sum())


_EXPECTED = (
    "expected a file that gshard-experts report --json or gshard-experts watched --json wrote, or "
    "the routers.jsonl of a run"
)


class _Use(msgspec.Struct):
    """The use of a layer's experts for the rows of all languages, in a report."""

    tokens: int
    load: list[float]
    dropped_share: float


class _Layer(msgspec.Struct):
    """A layer of a report."""

    path: str
    all: _Use


class _Report(msgspec.Struct):
    """The part of the output of `gshard-experts report --json` that plans read."""

    step: int
    layers: list[_Layer]
    watched: list[RouterRecord] = []


@dataclasses.dataclass(frozen=True)
class Loads:
    """The loads of a model's routers in several steps.

    Attributes:
      layers: path of a layer -> its records, one for each step, in the order of steps. All layers
        have the same steps.
      is_measured: whether the loads were measured on test rows and not in training steps. There is
        then one record, without positions and parts.
    """

    path: str
    layers: dict[str, list[RouterRecord]]
    is_measured: bool = False

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps."""
        return [record.step for record in next(iter(self.layers.values()))]


def load(path: str, first_step: int = 0) -> Loads:
    """Returns the loads in a file, beginning with `first_step`.

    Raises:
      UserError: names the option, the file and the reason if the file is missing, is of another
        kind, has loads that cannot be, or has no steps from `first_step` on.
    """
    with explained(f"`loads={path}`: cannot be read", OSError):
        content = objects.read_bytes(path)
    try:
        records, is_measured = _decoded(content)
    except msgspec.ValidationError as error:
        raise UserError(f"`loads={path}`: no loads of routers: {error}; {_EXPECTED}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"`loads={path}`: not JSON ({error}); {_EXPECTED}") from None
    if not records:
        raise UserError(f"`loads={path}`: no layer with experts is in it; {_EXPECTED}")
    for record in records:
        _check_record(path, record)
    return _from_step(Loads(path, _by_layer(path, records), is_measured), first_step)


def _decoded(content: bytes) -> tuple[Sequence[RouterRecord], bool]:
    """Returns the records, and whether they are of test rows."""
    start = content.lstrip()[:1]
    if start == b"[":
        return msgspec.json.decode(content, type=list[RouterRecord]), False
    lines = content.splitlines()
    if len(lines) > 1 and _is_json(lines[0]):
        # A run that goes on may be writing its last line.
        complete = content[: content.rfind(b"\n") + 1]
        return msgspec.json.Decoder(RouterRecord).decode_lines(complete), False
    found = msgspec.json.decode(content)
    if isinstance(found, dict) and "choices" in found:
        return [msgspec.convert(found, RouterRecord)], False
    report = msgspec.convert(found, _Report)
    if report.watched:
        return report.watched, False
    return [_of_report(layer, report.step) for layer in report.layers], True


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _of_report(layer: _Layer, step: int) -> RouterRecord:
    """Returns the load of a layer for test rows. The experts of a token are unknown: 0."""
    kept = [round(count) for count in layer.all.load]
    return RouterRecord(
        step=step,
        layer=layer.path,
        router="",
        experts_per_token=0.0,
        tokens=layer.all.tokens,
        choices=kept,
        kept=kept,
        dropped_share=layer.all.dropped_share,
        load_entropy=0.0,
    )


def _check_record(path: str, record: RouterRecord) -> None:
    """Raises ValueError if a record's counts cannot be."""
    where = f"`loads={path}`: {record.layer}, step {record.step:,}"
    width = len(record.choices)
    if not width:
        raise UserError(f"{where}: choices is empty; expected a count for each expert")
    counts = {"choices": record.choices, "kept": record.kept, "positions": record.positions}
    counts |= {f"by_part[{i}]": part for i, part in enumerate(record.by_part)}
    for name, values in counts.items():
        negative = np.flatnonzero(np.asarray(values) < 0)
        if negative.size:
            raise UserError(
                f"{where}: {name}[{negative[0]}] is {values[negative[0]]:,}; expected a count, 0 "
                "or more"
            )
        if name != "positions" and len(values) != width:
            raise UserError(
                f"{where}: {name} has {len(values)} counts and choices has {width}; expected one "
                "for each expert"
            )
    if not sum(record.choices):
        raise UserError(f"{where}: no token chose an expert; expected a count above 0")
    if record.by_part and np.any(np.sum(record.by_part, 0) != record.choices):
        raise UserError(f"{where}: by_part does not add up to choices, as it does in such a file")


def _by_layer(path: str, records: Iterable[RouterRecord]) -> dict[str, list[RouterRecord]]:
    """Returns the records of each layer, in the order of steps; the last one of a step counts."""
    found: dict[str, dict[int, RouterRecord]] = {}
    for record in records:
        found.setdefault(record.layer, {})[record.step] = record
    first = next(iter(found))
    for layer, by_step in found.items():
        missing = sorted(set(found[first]) ^ set(by_step))
        if missing:
            raise UserError(
                f"`loads={path}`: only one of {first} and {layer} has a record of step "
                f"{missing[0]:,}; expected the same steps of all layers"
            )
        widths = {len(record.choices) for record in by_step.values()}
        if len(widths) > 1:
            raise UserError(
                f"`loads={path}`: {layer} has {min(widths)} experts in one step and {max(widths)} "
                "in another; expected the loads of one model"
            )
    return {layer: [by_step[s] for s in sorted(by_step)] for layer, by_step in found.items()}


def _from_step(loads: Loads, first_step: int) -> Loads:
    last_step = loads.steps[-1]
    if first_step > last_step:
        raise UserError(
            f"`loads_from={first_step}`: the last step in `loads={loads.path}` is {last_step:,}; "
            "expected a smaller number"
        )
    layers = {
        layer: [record for record in records if record.step >= first_step]
        for layer, records in loads.layers.items()
    }
    return dataclasses.replace(loads, layers=layers)
