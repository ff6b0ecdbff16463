"""Exchanges: how rows of tokens reach the devices of their experts, and outputs come back.

Each device of a group has tokens and experts of its own. All exchanges compute the same:

- `gathered`: every device gets the tokens of all devices and computes the rows of its experts. A
  reduce-scatter adds the outputs and returns each device the sums of its tokens. Traffic does not
  depend on the loads, and grows with the devices of the group and not with a token's experts.
- `fixed`: an all-to-all sends each device a buffer for as many rows as `bound` allows.
- `ragged`: XLA's ragged-all-to-all sends the rows that there are (wings/kernels/exchange.py).

Which one is chosen, and why, is in `default_exchange`.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from lingvo_gshard.core import NestedMap, UserError, custom_gradient, random_numbers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.scopes import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.layers import Experts
from lingvo_gshard.layers.moe.dispatches.gather import Permutation
from lingvo_gshard.layers.moe.exchange import Codec
from lingvo_gshard.sharding import collectives, hardware_of, mesh_in_use
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.dropless.sorted_rows import SortedRows, clip_loads
from lingvo_gshard.wings.kernels.exchange import Route

LOCAL_LETTERS = {
    "a": "tokens of all devices of a group",
    "k": "choices of a token",
    "d": "devices of a group, along the axes of the experts",
    "s": "the same devices, as senders",
    "r": "sorted rows of a device",
}

Axes = tuple[str, ...]

# GPUs that NVLink connects within one host.
_HOST = 8
# XLA's ragged exchange reads past its table of peers in larger groups, on GPUs
# (https://github.com/openxla/xla/issues/47283).
_MOST_RAGGED = 32


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """Computes the tokens of one device on the devices of their experts, in a manual region.

    Attributes:
      experts: the experts.
      axes: mesh axes that split the experts. Devices along them are a group.
      num_experts: the number of experts on all devices, padding included.
      bound: as in DroplessDispatch.
      codec: the format of gathered tokens, and of the gradients of their sums.
    """

    experts: Experts
    axes: Axes
    num_experts: int
    bound: float
    codec: Codec

    @property
    def devices(self) -> int:
        """The number of devices of a group."""
        mesh = mesh_in_use()
        assert mesh is not None
        return mesh.parts(self.axes)

    @property
    def local_experts(self) -> int:
        """The number of experts of a device."""
        return self.num_experts // self.devices

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes one device's tokens, on all devices.

        Args:
          x_TM: the device's tokens.
          expert_kT: int32, the expert of each choice; `num_experts` where there is none.
          gate_kT: float32, the gate of each choice.
          theta: the weights of the device's experts.

        Returns:
          [T,M], the gate-weighted sums; and the number of rows over the bound, a float32 scalar.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no compute")

    def rows_for_device(self, rows: int) -> int:
        """Returns how many of its `rows` a device can send to each device."""
        return _bounded(self.bound, rows / self.devices, rows)

    def compute_received(
        self, received_CM: tf.Tensor, expert_C: tf.Tensor, theta: NestedMap, sent: int
    ) -> tf.Tensor:
        """Returns [C,M]: the outputs of a device's experts for the rows that arrived there.

        Args:
          received_CM: the rows.
          expert_C: int32, the number of each row's expert; `local_experts` where there is no row.
          theta: the weights of the device's experts.
          sent: the number of rows that each device has for all experts.
        """
        expert_1C = expert_C[tf.newaxis]
        gate_1C = tf.ones_like(expert_1C, tf.float32)
        rows = SortedRows(expert_1C, self.local_experts)
        return rows.compute(received_CM, gate_1C, self.experts, theta, sent)


class OwnRows(RowExchange):
    """Computes the tokens of a device that has all experts."""

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the tokens where they are; no row is over a bound.

        Tokens are rounded as if they were sent, so that results do not depend on the mesh.
        """
        rows = SortedRows(expert_kT, self.num_experts)
        x_TM = _gather_tokens(x_TM, (), self.codec)
        y_TM = rows.compute(x_TM, gate_kT, self.experts, theta)
        return _scatter_sums(y_TM, (), self.codec), tf.constant(0.0)


class GatheredExchange(RowExchange):
    """Gathers the tokens of all devices, and scatters the sums of their outputs."""

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the rows of all devices for the experts of this one; see RowExchange."""
        sent = expert_kT.shape.num_elements()
        with tf.name_scope(DISPATCH_SCOPE):
            x_aM = _gather_tokens(x_TM, self.axes, self.codec)
            expert_ka = collectives.all_gather(expert_kT, self.axes, 1)
            gate_ka = collectives.all_gather(gate_kT, self.axes, 1)
            own_ka = expert_ka - collectives.place_along(self.axes) * self.local_experts
            is_own_ka = (own_ka >= 0) & (own_ka < self.local_experts)
            rows = SortedRows(tf.where(is_own_ka, own_ka, self.local_experts), self.local_experts)
        bound = _bounded(self.bound, sent, sent * self.devices)
        y_aM = rows.compute(x_aM, gate_ka, self.experts, theta, sent, bound)
        with tf.name_scope(COMBINE_SCOPE):
            y_TM = _scatter_sums(y_aM, self.axes, self.codec)
        over_bound = tf.maximum(tf.reduce_sum(rows.load_E) - bound, 0)
        return y_TM, tf.cast(over_bound, tf.float32)


def _gather_tokens(x_TM: tf.Tensor, axes: Axes, codec: Codec) -> tf.Tensor:
    """Returns the tokens [a,M] of all devices, sent by the codec; gradients have their own type."""
    if codec.dtype in (None, x_TM.dtype.name):
        return collectives.all_gather(x_TM, axes, 0)

    @custom_gradient
    def gather(x: tf.Tensor):
        # Codecs take rows of four dimensions.
        sent = [collectives.all_gather(part, axes, 2) for part in codec.encode(x[None, None])]
        gradient = lambda d: collectives.reduce_scatter(d, axes, 0, keeps_type=True)  # noqa: E731
        return codec.decode(sent, x.dtype)[0, 0], gradient

    return cast(tf.Tensor, gather(x_TM))


def _scatter_sums(y_aM: tf.Tensor, axes: Axes, codec: Codec) -> tf.Tensor:
    """Returns [T,M]: a device's slice of the sums over devices; gradients are sent by the codec."""

    @custom_gradient
    def scatter(y: tf.Tensor):
        gradient = lambda d: _gather_tokens(d, axes, codec)  # noqa: E731
        return collectives.reduce_scatter(y, axes, 0, keeps_type=True), gradient

    return cast(tf.Tensor, scatter(y_aM))


class FixedExchange(RowExchange):
    """Sends each device a buffer of equal size."""

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends rows in buffers of `rows_for_device`, and their outputs back; see RowExchange."""
        devices, local_experts = self.devices, self.local_experts
        count = expert_kT.shape.num_elements()
        bound = self.rows_for_device(count)
        slots = devices * bound
        with tf.name_scope(DISPATCH_SCOPE):
            rows = SortedRows(expert_kT, self.num_experts)
            load_dE = tf.reshape(rows.load_E, [devices, local_experts])
            before_d = tf.cumsum(tf.reduce_sum(load_dE, 1), exclusive=True)
            device_kT = tf.minimum(expert_kT // local_experts, devices - 1)
            position_kT = rows.position_kT - tf.gather(before_d, device_kT)
            kept_kT = (expert_kT < self.num_experts) & (position_kT < bound)
            slot_kT = tf.where(kept_kT, device_kT * bound + position_kT, slots)
            permutation = Permutation(slot_kT, slots)
            sent_dE = clip_loads(load_dE, bound)
            sent_dCM = tf.reshape(permutation.permute(x_TM), [devices, bound, x_TM.shape[-1]])
            received_CM = collectives.all_to_all(sent_dCM, self.axes, 0, 1)[0]
            received_dE = collectives.all_to_all(sent_dE, self.axes, 0, 1)
        received_dE = tf.reshape(received_dE, [devices, local_experts])
        expert_C = tf.reshape(_experts_of_buffers(received_dE, bound), [slots])
        y_CM = self.compute_received(received_CM, expert_C, theta, count)
        with tf.name_scope(COMBINE_SCOPE):
            y_dCM = collectives.all_to_all(y_CM[tf.newaxis], self.axes, 1, 0)
            y_rows = tf.reshape(y_dCM, [slots, x_TM.shape[-1]])
            y_TM = permutation.unpermute(y_rows, gate_kT)
        over_bound = tf.reduce_sum(load_dE) - tf.reduce_sum(sent_dE)
        return y_TM, tf.cast(over_bound, tf.float32)


class RaggedExchange(RowExchange):
    """Sends the rows that there are, without padding."""

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends sorted rows, and their outputs back; see RowExchange."""
        devices, local_experts = self.devices, self.local_experts
        count = expert_kT.shape.num_elements()
        bound = self.rows_for_device(count)
        # A device receives at most this many rows.
        slots = devices * bound
        with tf.name_scope(DISPATCH_SCOPE):
            rows = SortedRows(expert_kT, self.num_experts)
            # Loads of each sender's rows, by the device and the number of their expert.
            load_sdE = tf.reshape(
                collectives.all_gather(rows.load_E[tf.newaxis], self.axes, 0),
                [devices, devices, local_experts],
            )
            kept_sdE = clip_loads(load_sdE, bound)
            place = collectives.place_along(self.axes)
            route = _route(load_sdE, kept_sdE, place)
            device_kT = tf.minimum(expert_kT // local_experts, devices - 1)
            end_d = route.first_sent + route.sent
            is_sent_kT = expert_kT < self.num_experts
            is_sent_kT &= rows.position_kT < tf.gather(end_d, device_kT)
            slot_kT = tf.where(is_sent_kT, rows.position_kT, count)
            permutation = Permutation(slot_kT, count, zero_empty=False)
            sorted_rM = permutation.permute(x_TM)
            received_CM = kernels.exchange.exchange(self.axes, sorted_rM, slots, route)
        received_sE = tf.gather(kept_sdE, place, axis=1)
        expert_C = _experts_of_sorted(received_sE, slots)
        y_CM = self.compute_received(received_CM, expert_C, theta, count)
        with tf.name_scope(COMBINE_SCOPE):
            y_rM = kernels.exchange.exchange(self.axes, y_CM, count, route.back())
            y_TM = permutation.unpermute(y_rM, gate_kT)
        own = tf.gather(load_sdE - kept_sdE, place)
        return y_TM, tf.cast(tf.reduce_sum(own), tf.float32)


EXCHANGES: dict[str, type[RowExchange]] = {
    "gathered": GatheredExchange,
    "fixed": FixedExchange,
    "ragged": RaggedExchange,
}


def check_exchange_name(name: str, path: str) -> None:
    """Raises UserError if no exchange has this name.

    Args:
      name: the name; "" for the default.
      path: Params path of the name, for the message.
    """
    if name and name not in EXCHANGES:
        raise UserError(f"{path}: {name!r}. {names.nearest(name, list(EXCHANGES))}")


def default_exchange(platform: str, devices: int, choices: float, bound: float) -> str:
    """Returns the name of the exchange that a group of devices uses by default.

    On GPUs, XLA's ragged exchange is slow: a step of a model with experts over eight B200 took
    15.6 s with it, and 3.85 s with `gathered`, where experts that are whole on each device took
    3.28 s (https://github.com/marin-community/marin/issues/7012). On eight H100 a layer with 128
    experts, 8 for each token, took 13.1 ms with `gathered` and 12.4 ms with DeepEP
    (https://github.com/marin-community/marin/issues/4311).

    `gathered` receives every token of the group once. `fixed` receives a row for each choice of as
    many tokens as a device has, times `bound`, and moves less in larger groups. Nobody has measured
    where it becomes faster. We accept four times the traffic for `gathered`, which drops fewer rows
    and sends no empty ones. On 64 GB200 `fixed` reached 22.4% of the peak
    (https://github.com/marin-community/marin/pull/7780).

    Args:
      platform: one of `platforms.PLATFORMS`; "" for CPUs.
      devices: the number of devices of a group.
      choices: experts of a token.
      bound: as in DroplessDispatch. Without one, `fixed` sends each device all that there can be.
    """
    hardware = hardware_of(platform)
    if hardware == "tpu":
        return "ragged"
    if hardware != "cuda":
        return "fixed"
    moves_less = devices <= _HOST or 4 * choices >= devices
    return "gathered" if moves_less or not bound else "fixed"


def exchange_class(
    name: str, platform: str, devices: int, choices: int, bound: float, path: str
) -> type[RowExchange]:
    """Returns the class of the exchange of a group of devices.

    Args:
      name: a name in EXCHANGES; "" for the default.
      platform: as in `default_exchange`, as are the next three.
      devices: as there.
      choices: as there.
      bound: as there.
      path: Params path of the name, for the message.

    Raises:
      UserError: the platform cannot compute the exchange in groups of this size.
    """
    if devices == 1:
        return OwnRows
    name = name or default_exchange(platform, devices, choices, bound)
    if name == "ragged" and hardware_of(platform) == "cuda" and devices > _MOST_RAGGED:
        raise UserError(
            f"{path}='ragged' exchanges rows in groups of {devices} GPUs, but XLA computes it for "
            f"at most {_MOST_RAGGED} (https://github.com/openxla/xla/issues/47283); set it to "
            "'gathered', to 'fixed' with a bound, or to ''"
        )
    return EXCHANGES[name]


def _bounded(bound: float, even_rows: float, rows: int) -> int:
    """Returns `bound` times the rows under balanced loads, and at most `rows`; 0: all `rows`."""
    return min(random_numbers.ceil(bound * even_rows), rows) if bound else rows


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


def _experts_of_buffers(load_dE: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns [d,C]: the local expert of each row that a device sent; E where it sent none."""
    after_dE = tf.cumsum(load_dE, axis=1)
    is_after_dCE = tf.range(rows)[tf.newaxis, :, tf.newaxis] >= after_dE[:, tf.newaxis]
    return tf.reduce_sum(tf.cast(is_after_dCE, tf.int32), -1)
