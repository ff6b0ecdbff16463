"""The rows that experts and devices get in each step, and what of them is dropped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core import rounding
from lingvo_gshard.layers.moe.dispatches.expert_blocks import BlockSizes
from lingvo_gshard.planning.loads.devices import rows_by_device
from lingvo_gshard.planning.loads.layers import ExpertLayer
from lingvo_gshard.training.run.routers.records import RouterRecord


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """The rows of one layer in T steps, scaled to the planned batch.

    All counts are of one micro-batch, the mean of those of a step.

    Attributes:
      layer: the planned layer.
      records: its record in each step.
    """

    layer: ExpertLayer
    records: Sequence[RouterRecord]

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """[T], planned tokens of a micro-batch over those of the recorded step."""
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
        """Whether the planned step has the groups of the recorded ones."""
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
            if not layer.bound or layer.devices.parts == 1:
                return np.zeros(len(self.records))
            to_device = self._to_device(placement)
            if to_device is None:
                return None
            return np.maximum(to_device - self.most_sent, 0).sum((1, 2, 3))
        if not layer.limits:
            return np.array([r.dropped_share for r in self.records]) * self.choices.sum(1)
        if not all(record.positions for record in self.records):
            return None
        over = [self._over(record, layer.capacity) for record in self.records]
        return np.array(over) * self.scale

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
        ratios = [self.layer.group_size / r.group_size for r in self.records]
        needed = [len(r.positions) * k for r, k in zip(self.records, ratios, strict=True)]
        return np.array([rounding.ceil(slots) for slots in needed])

    def sufficient_bound(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T]: the smallest bound that drops nothing; None if unknown."""
        if not self.layer.is_dropless or self.layer.devices.parts == 1:
            return None
        to_device = self._to_device(placement)
        if to_device is None:
            return None
        factor = to_device.max((1, 2, 3)) * self.layer.devices.parts / self.rows_of_device
        return np.array([rounding.ceil(value * 1e4) / 1e4 for value in factor])

    @property
    def rows_of_device(self) -> int:
        """The rows that the tokens of one device make, padding included."""
        layer = self.layer
        groups = -(-layer.groups // layer.devices.mesh.parts(layer.devices.group_axes))
        return round(groups * layer.group_size * layer.experts_per_token)

    @property
    def most_sent(self) -> int:
        """The rows that a device can send to another one (DroplessDispatch.bound)."""
        layer, rows = self.layer, self.rows_of_device
        if not layer.bound:
            return rows
        return min(rounding.ceil(layer.bound * rows / layer.devices.parts), rows)

    def computed(self, placement: np.ndarray) -> np.ndarray:
        """Returns [T]: rows that the slowest device computes, over those of the plan.

        A dropless dispatch computes an expert's rows in full blocks and a smaller one
        (`dispatches/expert_blocks.py`). The plan has even loads, and full blocks only.
        """
        parts, places = placement.shape
        slots = parts * self.most_sent if parts > 1 else self.rows_of_device
        sizes = BlockSizes.for_rows(slots, self.layer.devices.places)
        rows = np.ceil(rows_by_device(self.received, placement))
        full = np.maximum(rows - 1, 0) // sizes.full * sizes.full
        blocks = full + np.ceil((rows - full) / sizes.step) * sizes.step
        slowest = blocks.sum(-1).max((1, 2))
        even = -(-self.rows_of_device // self.layer.devices.places)
        active = min(self.layer.devices.places, self.rows_of_device)
        return slowest / (active * (max(even - 1, 0) // sizes.full + 1) * sizes.full)

    def _to_device(self, placement: np.ndarray) -> np.ndarray | None:
        """Returns [T, slices, sources, parts]: rows that devices send to each other."""
        return None if self.sent is None else rows_by_device(self.sent, placement).sum(-1)

    def _over(self, record: RouterRecord, capacity: int) -> float:
        """Returns the recorded requests that are dropped with a capacity."""
        ratio = self.layer.group_size / record.group_size
        position = np.ceil((np.arange(len(record.positions)) + 1) * ratio)
        return float(np.array(record.positions)[position > capacity].sum())
