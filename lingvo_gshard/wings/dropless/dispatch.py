"""Dropless dispatch: experts compute every token sent to them, without capacity or padding.

It follows MegaBlocks (Gale et al. 2022, arXiv 2211.15841). The rows of all groups are sorted by
expert, and each expert computes exactly its rows: by grouped products of the platform
(wings/kernels/grouped.py), or in blocks where the platform has none (expert_blocks.py).

On a mesh this is a manual region. Each device sorts the rows of its groups by the device of their
expert. One all-to-all sends the rows there, without padding where the platform has a ragged
exchange (wings/kernels/exchange.py). The device computes the rows that arrive as a single device
would, and sends the outputs back in a second all-to-all.

A device holds a part of the groups and of the experts. Weights that the strategy splits along
other letters are gathered before the region, and their gradients are scattered after it.
"""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import NestedMap, Params, UserError, context, random_numbers
from lingvo_gshard.core.context import Context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.scopes import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.layers import Experts, TokenChoiceRouting, token_context
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.dispatches.gather import Permutation
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.routing import count_rows
from lingvo_gshard.sharding import collectives, current_partitioning, manual, mesh_in_use
from lingvo_gshard.sharding.manual import resolve
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.dropless import sorted_experts
from lingvo_gshard.wings.dropless.expert_blocks import BlockSizes, ExpertBlocks, ExpertRows
from lingvo_gshard.wings.kernels.exchange import Route

LOCAL_LETTERS = {
    "k": "choices of a token",
    "d": "devices along the axes of the experts",
    "s": "the same devices, as senders",
    "r": "sorted rows of a device",
}


class SortedRows:
    """One row for each choice of each token, sorted by expert.

    Attributes:
      position_kT: int32, each row's position in the sorted order. Rows without an expert are last.
      load_E: int32, the number of rows of each expert.
    """

    def __init__(self, expert_kT: tf.Tensor, num_experts: int):
        """Sorts the rows.

        Args:
          expert_kT: int32, the expert of each choice of each token; num_experts or more where there
            is none.
          num_experts: size of E.
        """
        self._expert_kT = expert_kT
        count = expert_kT.shape.num_elements()
        order = tf.argsort(tf.reshape(expert_kT, [count]), stable=True)
        position = tf.scatter_nd(order[:, tf.newaxis], tf.range(count), [count])
        self.position_kT = tf.reshape(position, expert_kT.shape)
        self.load_E = count_rows(expert_kT, num_experts)

    def compute(
        self,
        x_TM: tf.Tensor,
        gate_kT: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        most_over_even: int = 1,
    ) -> tf.Tensor:
        """Returns [T,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        Args:
          x_TM: the tokens.
          gate_kT: float32, the gate of each choice.
          experts: the experts.
          theta: the weights of the experts of `load_E`.
          most_over_even: how many times as many rows there is room for as balanced loads take.
        """
        num_experts = self.load_E.shape[0]
        rows = self._expert_kT.shape.num_elements()
        even_rows = -(-rows // most_over_even)
        platform = sorted_experts.platform_for(rows, x_TM.dtype, theta)
        sizes = BlockSizes.for_rows(rows, num_experts)
        if platform:
            slots = kernels.grouped.padded_rows(platform, rows, even_rows, num_experts)
        else:
            # The last block may read up to one block past the last row.
            slots = rows + sizes.full
        slot_kT = tf.where(self._expert_kT < num_experts, self.position_kT, slots)
        # A kernel ignores the rows after the last group.
        permutation = Permutation(tf.unstack(slot_kT), slots, zero_empty=not platform)
        x_rows = permutation.permute(x_TM)
        if platform:
            y_rows = sorted_experts.compute_sorted(experts, theta, x_rows, self.load_E, even_rows)
        else:
            loads = ExpertRows.for_loads(self.load_E)
            blocks = ExpertBlocks(experts.compute_one, theta, loads, sizes, even_rows)
            y_rows = blocks.run(x_rows)
        return permutation.unpermute(y_rows, tf.unstack(gate_kT))


Axes = tuple[str, ...]

# Purpose of the random key for dropout in the region.
_PURPOSE = "dropless"


@dataclasses.dataclass(frozen=True)
class SortedExchange:
    """The manual region of one layer.

    Attributes:
      experts: the experts.
      group_axes: mesh axes that split the groups.
      expert_axes: the axes among `group_axes` that also split the experts.
      bound: as in DroplessDispatch.
    """

    experts: Experts
    group_axes: Axes
    expert_axes: Axes
    bound: float

    @classmethod
    def for_partitioning(cls, experts: Experts, bound: float) -> SortedExchange:
        """Returns the region for the current partitioning.

        Along axes that split experts but not groups, every device has all experts.
        """
        groups = resolve("GSM", 3)[0]
        return cls(experts, groups, tuple(a for a in resolve("EGCM", 4)[0] if a in groups), bound)

    def run(
        self, x_GSM: tf.Tensor, expert_kGS: tf.Tensor, gate_kGS: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the experts' outputs on all devices.

        Groups and experts that do not divide evenly over the devices are padded.

        Args:
          x_GSM: the tokens.
          expert_kGS: int32, the expert of each choice; num_experts or more where there is none.
          gate_kGS: float32, the gate of each choice.
          theta: the experts' weights.

        Returns:
          [G,S,M], the gate-weighted sums; and the number of rows over the bound, a float32 scalar.
        """
        groups = x_GSM.shape[0]
        group_parts, expert_parts = map(_count_devices, (self.group_axes, self.expert_axes))
        num_experts = self.experts.p.num_experts
        padded_experts = _round_up(num_experts, expert_parts)
        expert_kGS = tf.where(expert_kGS < num_experts, expert_kGS, padded_experts)
        padding = _round_up(groups, group_parts) - groups
        expert_kGS = tf.pad(
            expert_kGS, [[0, 0], [0, padding], [0, 0]], constant_values=padded_experts
        )
        gate_kGS = tf.pad(gate_kGS, [[0, 0], [0, padding], [0, 0]])
        weights = [
            _pad_experts(tf.cast(w, x_GSM.dtype), padded_experts) for w in tf.nest.flatten(theta)
        ]
        outer = context.current()

        def on_device(x_GSM, expert_kGS, gate_kGS, seed, *weights):
            tokens = math.prod(x_GSM.shape[:2])
            x_TM = tf.reshape(x_GSM, [tokens, x_GSM.shape[-1]])
            by_choice = [expert_kGS.shape[0], tokens]
            expert_kT, gate_kT = (tf.reshape(x, by_choice) for x in (expert_kGS, gate_kGS))
            theta_E = tf.nest.pack_sequence_as(theta, weights)
            device_context = dataclasses.replace(
                outer.part(),
                seed=self._device_seed(seed),
                on_output=None,
            )
            without_tokens = {"ids": None, "group_order": None}
            with context.use(device_context), token_context.override(**without_tokens):
                y_TM, over_bound = self._run_on_device(
                    x_TM, expert_kT, gate_kT, theta_E, padded_experts
                )
            return tf.reshape(y_TM, x_GSM.shape), over_bound[tf.newaxis]

        by_group, by_choice = (self.group_axes, (), ()), ((), self.group_axes, ())
        by_expert = [(self.expert_axes, *[()] * (w.shape.rank - 1)) for w in weights]
        splits = [by_group, by_choice, by_choice, ((),), *by_expert]
        region = manual(on_device, splits, [by_group, (self.group_axes,)])
        seed = self._seed(outer)
        y_GSM, over_bound = region(
            tf.pad(x_GSM, [[0, padding], [0, 0], [0, 0]]), expert_kGS, gate_kGS, seed, *weights
        )
        return y_GSM[:groups], tf.reduce_sum(over_bound)

    def _run_on_device(
        self,
        x_TM: tf.Tensor,
        expert_kT: tf.Tensor,
        gate_kT: tf.Tensor,
        theta: NestedMap,
        num_experts: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes one device's tokens, on all devices.

        Args:
          x_TM: the device's tokens.
          expert_kT: int32, the expert of each choice; `num_experts` where there is none.
          gate_kT: float32, the gate of each choice.
          theta: the weights of the device's experts.
          num_experts: the number of experts on all devices, padding included.

        Returns:
          [T,M], the gate-weighted sums; and the number of rows over the bound, a float32 scalar.
        """
        rows = SortedRows(expert_kT, num_experts)
        devices = _count_devices(self.expert_axes)
        if devices == 1:
            return rows.compute(x_TM, gate_kT, self.experts, theta), tf.constant(0.0)
        local_experts = num_experts // devices
        bound = self._rows_per_device(expert_kT.shape.num_elements(), devices)
        if kernels.exchange.is_available():
            region = RaggedRows(self, rows, expert_kT, local_experts, bound)
            return region.run(x_TM, gate_kT, theta)
        with tf.name_scope(DISPATCH_SCOPE):
            load_dE = tf.reshape(rows.load_E, [devices, local_experts])
            before_d = tf.cumsum(tf.reduce_sum(load_dE, 1), exclusive=True)
            device_kT = tf.minimum(expert_kT // local_experts, devices - 1)
            position_kT = rows.position_kT - tf.gather(before_d, device_kT)
            kept_kT = (expert_kT < num_experts) & (position_kT < bound)
            slots = devices * bound
            slot_kT = tf.where(kept_kT, device_kT * bound + position_kT, slots)
            permutation = Permutation(tf.unstack(slot_kT), slots)
            sent_dE = _clip_loads(load_dE, bound)
            sent_dCM = tf.reshape(permutation.permute(x_TM), [devices, bound, x_TM.shape[-1]])
            received_CM = self._to_experts(sent_dCM)[0]
            received_dE = tf.reshape(self._to_experts(sent_dE), [devices, local_experts])
        expert_C = tf.reshape(_experts_of_rows(received_dE, bound), [slots])
        count = expert_kT.shape.num_elements()
        y_CM = self.compute_received(received_CM, expert_C, local_experts, theta, count)
        with tf.name_scope(COMBINE_SCOPE):
            y_dCM = collectives.all_to_all(y_CM[tf.newaxis], self.expert_axes, 1, 0)
            y_rows = tf.reshape(y_dCM, [slots, x_TM.shape[-1]])
            y_TM = permutation.unpermute(y_rows, tf.unstack(gate_kT))
        over_bound = tf.reduce_sum(load_dE) - tf.reduce_sum(sent_dE)
        return y_TM, tf.cast(over_bound, tf.float32)

    def compute_received(
        self,
        received_CM: tf.Tensor,
        expert_C: tf.Tensor,
        local_experts: int,
        theta: NestedMap,
        sent: int,
    ) -> tf.Tensor:
        """Returns [C,M]: the outputs of a device's experts for the rows that arrived there.

        Args:
          received_CM: the rows.
          expert_C: int32, the number of each row's expert; `local_experts` where there is no row.
          local_experts: the number of experts of the device.
          theta: their weights.
          sent: the number of rows that each device has for all experts.
        """
        expert_1C = expert_C[tf.newaxis]
        room = max(expert_C.shape[0] // sent, 1)
        gate_1C = tf.ones_like(expert_1C, tf.float32)
        rows = SortedRows(expert_1C, local_experts)
        return rows.compute(received_CM, gate_1C, self.experts, theta, room)

    def _to_experts(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the rows received from all devices, concatenated along the second dimension."""
        return collectives.all_to_all(x, self.expert_axes, 0, 1)

    def _rows_per_device(self, rows: int, devices: int) -> int:
        """Returns the number of its `rows` that a device can send to each device."""
        return min(random_numbers.ceil(self.bound * rows / devices), rows) if self.bound else rows

    def _seed(self, outer: Context) -> tf.Tensor:
        """Returns the int32 [2] key of this layer's dropout, or zeros without dropout."""
        if not (outer.training and self.experts.p.dropout_rate):
            return tf.zeros([2], tf.int32)
        return outer.random_seed(f"{context.layer_path()}/{_PURPOSE}")

    def _device_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns the key of one device: devices with different rows draw different numbers."""
        if not self.experts.p.dropout_rate:
            return seed
        for axis in self.group_axes:
            seed = random_numbers.hashed_fold_in_word(seed, collectives.axis_index(axis))
        return seed


@dataclasses.dataclass(frozen=True)
class RaggedRows:
    """The rows of a device, which travel to their experts and back without padding.

    Attributes:
      region: the manual region.
      rows: the rows of this device, sorted by expert.
      expert_kT: int32, the expert of each choice; the number of experts where there is none.
      local_experts: the number of experts of each device.
      bound: the most rows that a device sends to another one.
    """

    region: SortedExchange
    rows: SortedRows
    expert_kT: tf.Tensor
    local_experts: int
    bound: int

    def run(
        self, x_TM: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes one device's tokens, on all devices.

        Args:
          x_TM: the device's tokens.
          gate_kT: float32, the gate of each choice.
          theta: the weights of the device's experts.

        Returns:
          [T,M], the gate-weighted sums; and the number of rows over the bound, a float32 scalar.
        """
        axes = self.region.expert_axes
        devices = _count_devices(axes)
        count = self.expert_kT.shape.num_elements()
        # A device receives at most this many rows.
        slots = devices * self.bound
        with tf.name_scope(DISPATCH_SCOPE):
            # Loads of each sender's rows, by the device and the number of their expert.
            load_sdE = tf.reshape(
                collectives.all_gather(self.rows.load_E[tf.newaxis], axes, 0),
                [devices, devices, self.local_experts],
            )
            kept_sdE = _clip_loads(load_sdE, self.bound)
            place = collectives.place_along(axes)
            route = _route(load_sdE, kept_sdE, place)
            slots_kT = self._slots(route, count)
            permutation = Permutation(tf.unstack(slots_kT), count, zero_empty=False)
            sorted_rM = permutation.permute(x_TM)
            received_CM = kernels.exchange.exchange(axes, sorted_rM, slots, route)
        received_sE = tf.gather(kept_sdE, place, axis=1)
        expert_C = _experts_of_sorted(received_sE, slots)
        y_CM = self.region.compute_received(received_CM, expert_C, self.local_experts, theta, count)
        with tf.name_scope(COMBINE_SCOPE):
            y_rM = kernels.exchange.exchange(axes, y_CM, count, route.back())
            y_TM = permutation.unpermute(y_rM, tf.unstack(gate_kT))
        own = tf.gather(load_sdE - kept_sdE, place)
        return y_TM, tf.cast(tf.reduce_sum(own), tf.float32)

    def _slots(self, route: Route, count: int) -> tf.Tensor:
        """Returns [k,T]: the place of each choice's row in the sorted rows; `count` if unsent."""
        devices = route.sent.shape[0]
        device_kT = tf.minimum(self.expert_kT // self.local_experts, devices - 1)
        end_d = route.first_sent + route.sent
        kept_kT = self.expert_kT < devices * self.local_experts
        kept_kT &= self.rows.position_kT < tf.gather(end_d, device_kT)
        return tf.where(kept_kT, self.rows.position_kT, count)


def _route(load_sdE: tf.Tensor, kept_sdE: tf.Tensor, place: tf.Tensor) -> Route:
    """Returns the route of one device's rows to the devices of their experts.

    Args:
      load_sdE: the rows of each sender for each expert of each device.
      kept_sdE: those that it sends.
      place: the place of this device among senders.
    """
    load_sd, kept_sd = (tf.reduce_sum(x, -1) for x in (load_sdE, kept_sdE))
    # Unsent rows stay where they are: at the end of those for their device.
    first_sd = tf.cumsum(load_sd, axis=1, exclusive=True)
    target_sd = tf.cumsum(kept_sd, axis=0, exclusive=True)
    return Route(
        first_sent=first_sd[place],
        sent=kept_sd[place],
        first_there=target_sd[place],
        first_received=target_sd[:, place],
        received=kept_sd[:, place],
        first_of_sender=first_sd[:, place],
    )


def _experts_of_sorted(received_sE: tf.Tensor, slots: int) -> tf.Tensor:
    """Returns [C]: the expert of each received row; E where there is none.

    Args:
      received_sE: the rows of each sender for each expert. They are in this order.
      slots: size of C.
    """
    senders, experts = received_sE.shape.as_list()
    last_sE = tf.reshape(tf.cumsum(tf.reshape(received_sE, [-1])), [senders, experts])
    index_C = tf.range(slots)
    is_after_Cs = index_C[:, tf.newaxis] >= last_sE[:, -1]
    sender_C = tf.reduce_sum(tf.cast(is_after_Cs, tf.int32), 1)
    last_CE = tf.gather(last_sE, tf.minimum(sender_C, senders - 1))
    is_after_CE = index_C[:, tf.newaxis] >= last_CE
    return tf.reduce_sum(tf.cast(is_after_CE, tf.int32), 1)


def _pad_experts(weight: tf.Tensor, num_experts: int) -> tf.Tensor:
    """Returns a weight [E,...] padded with zeros to `num_experts` experts."""
    padding = num_experts - weight.shape[0]
    return tf.pad(weight, [[0, padding], *[[0, 0]] * (weight.shape.rank - 1)])


def _clip_loads(load_dE: tf.Tensor, bound: int) -> tf.Tensor:
    """Returns the loads [...,d,E] of devices' experts without rows beyond a device's bound."""
    before_dE = tf.cumsum(load_dE, axis=-1, exclusive=True)
    return tf.clip_by_value(bound - before_dE, 0, load_dE)


def _experts_of_rows(load_dE: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns [d,C]: the local expert of each row that a device sent; E where it sent none."""
    after_dE = tf.cumsum(load_dE, axis=1)
    is_after_dCE = tf.range(rows)[tf.newaxis, :, tf.newaxis] >= after_dE[:, tf.newaxis]
    return tf.reduce_sum(tf.cast(is_after_dCE, tf.int32), -1)


def _count_devices(axes: Axes) -> int:
    mesh = mesh_in_use()
    assert mesh is not None
    return mesh.parts(axes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class DroplessDispatch(Dispatch):
    """Sorts rows by expert. Each expert computes exactly the rows sent to it."""

    is_dropless = True
    is_vectorizable = False
    has_manual_regions = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "bound",
            0.0,
            "On a mesh, the rows that a device can send to another device, as a multiple of the "
            "number under balanced loads. Rows above it are dropped. 0: no bound, no dropped rows.",
            minimum=0,
        )
        return p

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises ValueError if any option of the exchange is set; all options are for buffers."""
        for name, value in exchange.items():
            if value != exchange.default(name):
                raise UserError(
                    f"{path}.{name}={value!r} applies to capacity buffers, which {self.path} "
                    "(DroplessDispatch) does not have; reset it or choose another dispatch"
                )

    def run(
        self,
        routing: TokenChoiceRouting,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        With a bound it reports the metric `over_bound_share`, the share of rows that were dropped.
        """
        assignments, num_experts = routing.assignments, routing.num_experts
        expert_kGS = tf.stack([tf.where(a.kept_GS, a.expert_GS, num_experts) for a in assignments])
        gate_kGS = tf.stack([a.gate_GS for a in assignments])
        over_bound = tf.constant(0.0)
        if current_partitioning() is None or mesh_in_use() is None:
            y_GSM = _run_on_one_device(x_GSM, expert_kGS, gate_kGS, experts, theta)
        else:
            region = SortedExchange.for_partitioning(experts, self.p.bound)
            y_GSM, over_bound = region.run(x_GSM, expert_kGS, gate_kGS, theta)
        if self.p.bound:
            rows = tf.reduce_sum(tf.cast(expert_kGS < num_experts, tf.float32))
            name = f"{context.layer_path()}/over_bound_share"
            context.current().add_metric(name, over_bound / tf.maximum(rows, 1.0), rows)
            if token_context.current().on_routing is not None:
                context.current().add_sum(f"{context.layer_path()}/over_bound", over_bound)
        return y_GSM


def _run_on_one_device(
    x_GSM: tf.Tensor,
    expert_kGS: tf.Tensor,
    gate_kGS: tf.Tensor,
    experts: Experts,
    theta: NestedMap,
) -> tf.Tensor:
    choices, groups, size = expert_kGS.shape.as_list()
    expert_kT, gate_kT = (tf.reshape(x, [choices, groups * size]) for x in (expert_kGS, gate_kGS))
    x_TM = tf.reshape(x_GSM, [groups * size, x_GSM.shape[-1]])
    rows = SortedRows(expert_kT, experts.p.num_experts)
    return tf.reshape(rows.compute(x_TM, gate_kT, experts, theta), x_GSM.shape)
