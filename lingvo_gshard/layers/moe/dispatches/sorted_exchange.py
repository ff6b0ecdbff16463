"""Sorted rows on a mesh: a manual region in which devices send one another rows for their experts.

A device holds the groups that are its share and whole experts of its own. Weights that a strategy
splits otherwise are gathered on the way in, and their gradients scattered on the way out.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.context import Context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import exchange as exchanges
from lingvo_gshard.layers.moe.dispatches.places_of_rows import PlacesOfRows
from lingvo_gshard.layers.moe.dispatches.sorted_rows import SortedRows
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.sharding import collectives
from lingvo_gshard.sharding.manual import manual, mesh_in_use, resolve

Axes = tuple[str, ...]

# Random numbers of dropout, in the layer's name.
_PURPOSE = "dropless"


@dataclasses.dataclass(frozen=True)
class SortedExchange:
    """The region of one layer.

    group_axes: that groups are split over. expert_axes: of those the ones that experts are. bound:
    as in DroplessDispatch.
    """

    experts: Experts
    group_axes: Axes
    expert_axes: Axes
    bound: float

    @classmethod
    def of(cls, experts: Experts, bound: float) -> SortedExchange:
        """Returns that of the partitioning in use.

        Along axes that experts are split over and groups are not, every device has all experts.
        """
        groups = resolve("GSM", 3)[0]
        return cls(experts, groups, tuple(a for a in resolve("EGCM", 4)[0] if a in groups), bound)

    def run(
        self, x_GSM: tf.Tensor, expert_KGS: tf.Tensor, gate_KGS: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns [G,S,M], and how many rows were over the bound, a float32 scalar.

        expert: num_experts or more where there is none. Groups and experts that devices cannot
        share evenly are padded.
        """
        groups = x_GSM.shape[0]
        group_parts, expert_parts = map(_parts, (self.group_axes, self.expert_axes))
        num_experts = self.experts.p.num_experts
        nowhere = _up_to_multiple(num_experts, expert_parts)
        expert_KGS = tf.where(expert_KGS < num_experts, expert_KGS, nowhere)
        more = _up_to_multiple(groups, group_parts) - groups
        expert_KGS = tf.pad(expert_KGS, [[0, 0], [0, more], [0, 0]], constant_values=nowhere)
        gate_KGS = tf.pad(gate_KGS, [[0, 0], [0, more], [0, 0]])
        weights = [
            tf.pad(w, [[0, nowhere - num_experts], *[[0, 0]] * (w.shape.rank - 1)])
            for w in (tf.cast(w, x_GSM.dtype) for w in tf.nest.flatten(theta))
        ]
        now = context.current()

        def on_device(x_GSM, expert_KGS, gate_KGS, seed, *weights):
            tokens = math.prod(x_GSM.shape[:2])
            x_TM = tf.reshape(x_GSM, [tokens, x_GSM.shape[-1]])
            by_choice = [expert_KGS.shape[0], tokens]
            routed = [tf.reshape(x, by_choice) for x in (expert_KGS, gate_KGS)]
            part = dataclasses.replace(
                now.part(), seed=self._device_seed(seed), on_output=None, token_ids=None
            )
            with context.use(part):
                y_TM, over = self._on_device(
                    x_TM, *routed, tf.nest.pack_sequence_as(theta, weights), nowhere
                )
            return tf.reshape(y_TM, x_GSM.shape), over[tf.newaxis]

        by_group = (self.group_axes, (), ())
        by_choice = ((), self.group_axes, ())
        splits = [by_group, by_choice, by_choice, ((),)]
        splits += [(self.expert_axes, *[()] * (w.shape.rank - 1)) for w in weights]
        region = manual(on_device, splits, [by_group, (self.group_axes,)])
        seed = self._seed(now)
        y_GSM, over = region(
            tf.pad(x_GSM, [[0, more], [0, 0], [0, 0]]), expert_KGS, gate_KGS, seed, *weights
        )
        return y_GSM[:groups], tf.reduce_sum(over)

    def _on_device(
        self,
        x_TM: tf.Tensor,
        expert_KT: tf.Tensor,
        gate_KT: tf.Tensor,
        theta: NestedMap,
        num_experts: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns [T,M] and the rows over the bound, of one device's tokens by all devices."""
        rows = SortedRows(expert_KT, num_experts)
        devices = _parts(self.expert_axes)
        if devices == 1:
            return rows.compute(x_TM, gate_KT, self.experts, theta), tf.constant(0.0)
        own = num_experts // devices
        bound = self._bound_of(expert_KT.shape.num_elements(), devices)
        with tf.name_scope(exchanges.DISPATCH_SCOPE):
            load_DE = tf.reshape(rows.load_E, [devices, own])
            before_D = tf.cumsum(tf.reduce_sum(load_DE, 1), exclusive=True)
            device_KT = tf.minimum(expert_KT // own, devices - 1)
            position_KT = rows.place_KT - tf.gather(before_D, device_KT)
            kept_KT = (expert_KT < num_experts) & (position_KT < bound)
            slots = devices * bound
            slot_KT = tf.where(kept_KT, device_KT * bound + position_KT, slots)
            places = PlacesOfRows(slot_KT, slots)
            sent_DE = _within(load_DE, bound)
            sent_DCM = tf.reshape(places.fill(x_TM), [devices, bound, x_TM.shape[-1]])
            arrived_CM = self._to_experts(sent_DCM)[0]
            arrived_DE = tf.reshape(self._to_experts(sent_DE), [devices, own])
        arrived_C = tf.reshape(_experts_of(arrived_DE, bound), [1, slots])
        y_CM = SortedRows(arrived_C, own).compute(
            arrived_CM, tf.ones_like(arrived_C, tf.float32), self.experts, theta
        )
        with tf.name_scope(exchanges.COMBINE_SCOPE):
            y_DCM = collectives.all_to_all(y_CM[tf.newaxis], self.expert_axes, 1, 0)
            y_TM = places.collect(tf.reshape(y_DCM, [slots, x_TM.shape[-1]]), gate_KT)
        over = tf.reduce_sum(load_DE) - tf.reduce_sum(sent_DE)
        return y_TM, tf.cast(over, tf.float32)

    def _to_experts(self, x: tf.Tensor) -> tf.Tensor:
        """What devices have for this one, side by side in the second dimension."""
        return collectives.all_to_all(x, self.expert_axes, 0, 1)

    def _bound_of(self, rows: int, devices: int) -> int:
        """How many of its rows a device can send to another."""
        return min(math.ceil(self.bound * rows / devices), rows) if self.bound else rows

    def _seed(self, now: Context) -> tf.Tensor:
        """What the region's random numbers come from, in this pass and this layer; if any."""
        if not (now.training and self.experts.p.dropout_rate):
            return tf.zeros([2], tf.int32)
        return now.random_seed(f"{context.layer_path()}/{_PURPOSE}")

    def _device_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """The same for a device: another one where it has other rows."""
        if not self.experts.p.dropout_rate:
            return seed
        for axis in self.group_axes:
            seed = random_numbers.hashed_fold_in_word(seed, collectives.axis_index(axis))
        return seed


def _within(load_DE: tf.Tensor, bound: int) -> tf.Tensor:
    """The loads of each device's experts, as many of their rows as are within the bound."""
    before_DE = tf.cumsum(load_DE, axis=1, exclusive=True)
    return tf.clip_by_value(bound - before_DE, 0, load_DE)


def _experts_of(load_DE: tf.Tensor, rows: int) -> tf.Tensor:
    """The expert [D,C] of each row that a device sent; E where it sent none."""
    after_DE = tf.cumsum(load_DE, axis=1)
    is_after_DCE = tf.range(rows)[tf.newaxis, :, tf.newaxis] >= after_DE[:, tf.newaxis]
    return tf.reduce_sum(tf.cast(is_after_DCE, tf.int32), -1)


def _parts(axes: Axes) -> int:
    mesh = mesh_in_use()
    return math.prod(mesh.axis_size(axis) for axis in axes)


def _up_to_multiple(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
