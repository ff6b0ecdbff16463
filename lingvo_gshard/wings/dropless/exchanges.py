"""Exchanges: how rows of tokens reach the devices of their experts, and outputs come back.

Each device of a group has tokens and experts of its own. All exchanges compute the same:

- `gathered`: every device gets the tokens of all devices and computes the rows of its experts. A
  reduce-scatter adds the outputs and returns each device the sums of its tokens. Traffic does not
  depend on the loads, and grows with the devices of the group and not with a token's experts.
- `fixed`: an all-to-all sends each device a buffer for as many rows as `bound` allows.
- `ragged`: XLA's ragged-all-to-all sends the rows that there are (wings/kernels/exchange.py).

Which one is chosen, and why, is in `default_exchange`. `layers.moe.exchange.Exchange` has options
for all of them: 8 bits, parts of the tokens one after another, and a step for each mesh axis. In
two steps, a token crosses once to each host that has one of its experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from lingvo_gshard.core import (
    NestedMap,
    Params,
    UserError,
    custom_gradient,
    known_sizes,
    optimization_barrier,
    random_numbers,
    scopes,
    tf,
)
from lingvo_gshard.layers import Codec, Exchange, Experts, Permutation
from lingvo_gshard.sharding import collectives, hardware_of, mesh_in_use, platform_in_use
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.dropless.sorted_rows import SortedRows, clip_loads
from lingvo_gshard.wings.kernels.exchange import Route

LOCAL_LETTERS = {
    "h": "hosts, along all axes of the experts but the last",
    "a": "tokens of all devices of a group",
    "k": "choices of a token",
    "d": "devices of a group, along the axes of the experts",
    "s": "the same devices, as senders",
    "r": "sorted rows of a device",
}

Axes = tuple[str, ...]
Move: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"

# GPUs that NVLink connects within one host.
_HOST = 8
# XLA's ragged exchange reads past its table of peers in larger groups, on GPUs
# (https://github.com/openxla/xla/issues/47283).
_MOST_RAGGED = 32
# XLA's kernel for GPUs starts one block for each update. Slices in 32 updates took 0.78 s where one
# took 13.8 s (https://github.com/marin-community/marin/issues/8077). The rows of an expert are an
# update, as in https://github.com/marin-community/marin/pull/8549.
LEAST_UPDATES = 32


@dataclasses.dataclass(frozen=True)
class Trip:
    """The way of some tokens to the devices of their experts and back.

    Attributes:
      there: [T,M] -> [C,M], from the tokens of this device to the rows that arrive at it.
      compute: ([C,M], weights) -> [C,M], the outputs of this device's experts for them.
      back: [C,M] -> [T,M], from the outputs to the gate-weighted sums of this device's tokens.
      kept: returns [k,T], which choices of this device's tokens are computed: those within the
        bound.
      over_bound: the number of rows over the bound, an int32 scalar.
    """

    there: Move
    compute: Callable[[tf.Tensor, NestedMap], tf.Tensor]
    back: Move
    kept: Callable[[], tf.Tensor]
    over_bound: tf.Tensor | int = 0


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """Computes the tokens of one device on the devices of their experts, in a manual region.

    Attributes:
      axes: mesh axes that split the experts. Devices along them are a group.
      num_experts: the number of experts on all devices, padding included.
      bound: as in DroplessDispatch.
    """

    experts: Experts
    axes: Axes
    num_experts: int
    bound: float
    exchange: Exchange

    @property
    def devices(self) -> int:
        """The number of devices of a group."""
        return count_devices(self.axes)

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
        sizes, trips = self._trips(expert_kT, gate_kT)
        y_TM = _run(trips, tf.split(x_TM, sizes), theta)
        return y_TM, tf.cast(sum(trip.over_bound for trip in trips), tf.float32)

    def left(self, expert_kT: tf.Tensor) -> tf.Tensor:
        """Returns [k,T]: the experts of the rows over the bound, `num_experts` for all others."""
        _, trips = self._trips(expert_kT, tf.ones(expert_kT.shape))
        kept_kT = tf.concat([trip.kept() for trip in trips], 1)
        return tf.where(kept_kT, self.num_experts, expert_kT)

    def _trips(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> tuple[list[int], list[Trip]]:
        """Returns the number of tokens of each part, and their trips."""
        tokens = known_sizes(expert_kT.shape)[1]
        sizes = self.exchange.sizes_of_chunks(tokens) if self.devices > 1 else [tokens]
        with tf.name_scope(scopes.DISPATCH_SCOPE):
            choices = zip(tf.split(expert_kT, sizes, 1), tf.split(gate_kT, sizes, 1), strict=True)
            return sizes, [self.trip(*each) for each in choices]

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Returns the way of some of a device's tokens; for the arguments see `compute`."""
        raise NotImplementedError(f"{type(self).__name__} defines no trip")


def _run(trips: Sequence[Trip], parts_TM: Sequence[tf.Tensor], theta: NestedMap) -> tf.Tensor:
    """Returns [T,M], the sums of tokens whose parts are computed one after another.

    While experts compute a part, the next one arrives and the outputs of the one before return.
    XLA's scheduler rates all custom calls alike (`GpuLatencyEstimator::NodeCost` in openxla/xla).
    Without barriers, it has all parts arrive before the first product.
    """
    arrived: list[tf.Tensor] = []
    for trip, x_TM in zip(trips, parts_TM, strict=True):
        with tf.name_scope(scopes.DISPATCH_SCOPE):
            if arrived:
                x_TM, arrived[-1] = _wait_for_both(x_TM, arrived[-1])
            arrived.append(trip.there(x_TM))
    returned: list[tf.Tensor] = []
    y_CM = None
    for index, (trip, x_CM) in enumerate(zip(trips, arrived, strict=True)):
        if y_CM is None:
            with Exchange.chunk_context(index):
                y_CM = trip.compute(x_CM, theta)
            continue
        x_CM, y_CM = _wait_for_both(x_CM, y_CM)
        with Exchange.chunk_context(index):
            following_CM = trip.compute(x_CM, theta)
        with tf.name_scope(scopes.COMBINE_SCOPE):
            y_TM, y_CM = _wait_for_both(trips[index - 1].back(y_CM), following_CM)
        returned.append(y_TM)
    assert y_CM is not None
    with tf.name_scope(scopes.COMBINE_SCOPE):
        return tf.concat([*returned, trips[-1].back(y_CM)], 0)


def _wait_for_both(one: tf.Tensor, other: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns both tensors, neither before the other is computed. So are their gradients."""

    @custom_gradient
    def wait(one: tf.Tensor, other: tf.Tensor):
        gradient = lambda *gradients: tuple(optimization_barrier(gradients)[0])  # noqa: E731
        return tuple(optimization_barrier([one, other])[0]), gradient

    return cast("Sequence[tf.Tensor]", wait(one, other))


class OwnRows(RowExchange):
    """Computes the tokens of a device that has all experts."""

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Computes the tokens where they are; no row is over a bound.

        Tokens are rounded as if they were sent, so that results do not depend on the mesh.
        """
        rows = SortedRows(expert_kT, self.num_experts)
        return Trip(
            lambda x: _send(x, tf.identity, tf.identity, self.exchange.codec, Codec()),
            lambda x, theta: rows.compute(x, gate_kT, self.experts, theta),
            lambda y: _send(y, tf.identity, tf.identity, Codec(), self.exchange.codec),
            lambda: expert_kT < self.num_experts,
        )


class GatheredExchange(RowExchange):
    """Gathers the tokens of all devices, and scatters the sums of their outputs."""

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Computes the rows of all devices for the experts of this one; see RowExchange."""
        steps = [(axis,) for axis in self.axes] if self.exchange.p.hierarchical else [self.axes]

        def gather(rows: tf.Tensor) -> tf.Tensor:
            for axes in steps:
                rows = collectives.all_gather(rows, axes, 0)
            return rows

        def scatter(rows: tf.Tensor) -> tf.Tensor:
            for axes in reversed(steps):
                rows = _scattered(rows, axes)
            return rows

        return self.trip_by(gather, scatter, expert_kT, gate_kT)

    def trip_by(
        self, gather: Move, scatter: Move, expert_kT: tf.Tensor, gate_kT: tf.Tensor
    ) -> Trip:
        """Returns the way of tokens that are gathered, and whose sums are scattered.

        Args:
          gather: [T,...] -> [a,...], from a row for each token of this device to the rows of all
            devices; zeros where there is no token.
          scatter: [a,M] -> [T,M], the reverse, with the sums over devices.
        """
        sent = expert_kT.shape.num_elements()
        # No token has no expert: 0 becomes -1.
        expert_ka = tf.transpose(gather(tf.transpose(expert_kT) + 1)) - 1
        gate_ka = tf.transpose(gather(tf.transpose(gate_kT)))
        own_ka = expert_ka - collectives.place_along(self.axes) * self.local_experts
        is_own_ka = (own_ka >= 0) & (own_ka < self.local_experts)
        rows = SortedRows(tf.where(is_own_ka, own_ka, self.local_experts), self.local_experts)
        bound = _bounded(self.bound, sent, sent * self.devices)

        def kept() -> tf.Tensor:
            computed = tf.minimum(tf.reduce_sum(rows.load_E), bound)
            is_computed_ka = tf.cast(rows.position_kT < computed, tf.float32)
            return tf.transpose(scatter(tf.transpose(is_computed_ka))) > 0

        return Trip(
            lambda x: _send(x, gather, scatter, self.exchange.codec, Codec()),
            lambda x, theta: rows.compute(x, gate_ka, self.experts, theta, sent, bound),
            lambda y: _send(y, scatter, gather, Codec(), self.exchange.codec),
            kept,
            tf.maximum(tf.reduce_sum(rows.load_E) - bound, 0),
        )


class TwoStepExchange(GatheredExchange):
    """Sends each host the tokens that have experts there, and gathers them within the host.

    A token crosses once to a host, however many of its experts are there. DeepEP and HybridEP do
    the same (https://github.com/deepseek-ai/DeepEP). The last mesh axis is within a host.
    """

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Sends tokens in buffers, one for each host, and the sums of a host back."""
        (*outer, inner), (choices, tokens) = self.axes, expert_kT.shape
        hosts = count_devices(tuple(outer))
        # The share of tokens that have an expert on a host if each choice has any of them.
        share = 1 - (1 - 1 / hosts) ** choices
        room = _bounded(self.bound, share * tokens, tokens)
        host_kT = expert_kT // (self.num_experts // hosts)
        count_hT = tf.reduce_sum(
            tf.cast(host_kT == tf.range(hosts)[:, tf.newaxis, tf.newaxis], tf.int32), 1
        )
        goes_hT = tf.cast(count_hT > 0, tf.int32)
        place_hT = tf.cumsum(goes_hT, axis=1, exclusive=True)
        is_sent_hT = (count_hT > 0) & (place_hT < room)
        slot_hT = tf.range(hosts)[:, tf.newaxis] * room + place_hT
        slots = hosts * room
        slot_hT = tf.where(is_sent_hT, slot_hT, slots)
        permutation = Permutation(slot_hT, slots)

        def gather(rows: tf.Tensor) -> tf.Tensor:
            sent = tf.reshape(permutation.permute(rows), [hosts, room, rows.shape[-1]])
            own = collectives.all_to_all(sent, tuple(outer), 0, 1)[0]
            return collectives.all_gather(own, inner, 0)

        def scatter(rows: tf.Tensor) -> tf.Tensor:
            own = _scattered(rows, (inner,))
            back = collectives.all_to_all(own[tf.newaxis], tuple(outer), 1, 0)
            return permutation.unpermute(tf.reshape(back, [slots, rows.shape[-1]]), None)

        trip = self.trip_by(gather, scatter, expert_kT, gate_kT)
        unsent = tf.reduce_sum(tf.where(is_sent_hT, 0, count_hT))
        return dataclasses.replace(trip, over_bound=trip.over_bound + unsent)


def _scattered(rows: tf.Tensor, axes: Axes) -> tf.Tensor:
    """Returns this device's slice of the sums over devices.

    Among hosts, a sum in float32 sends fewer bytes than an all-to-all of 16 bits, since XLA adds
    what crosses within each host first.
    """
    return collectives.reduce_scatter(rows, axes, 0, keeps_type=count_devices(axes) <= _HOST)


def _send(x: tf.Tensor, there: Move, back: Move, codec: Codec, returning: Codec) -> tf.Tensor:
    """Returns rows [R,M] after a move, and brings their gradients back.

    Args:
      there: moves arrays [R,...].
      codec: the format of the rows.
      returning: the format of their gradients.
    """

    @custom_gradient
    def send(x: tf.Tensor):
        return _moved(x, there, codec), lambda d_y: _moved(d_y, back, returning)

    return cast(tf.Tensor, send(x))


def _moved(x: tf.Tensor, move: Move, codec: Codec) -> tf.Tensor:
    if codec.dtype in (None, x.dtype.name):
        return move(x)
    moved = []
    # Codecs take rows of four dimensions, and return some of three, a number for each row.
    for part in codec.encode(x[tf.newaxis, tf.newaxis]):
        rows = move(tf.reshape(part, [x.shape[0], -1]))
        moved.append(tf.reshape(rows, [1, 1, rows.shape[0], *part.shape[3:]]))
    return codec.decode(moved, x.dtype)[0, 0]


class FixedExchange(RowExchange):
    """Sends each device a buffer of equal size."""

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Sends rows in buffers of `rows_for_device`, and their outputs back; see RowExchange."""
        devices = self.devices
        bound = self.rows_for_device(expert_kT)
        slots = devices * bound
        rows = SortedRows(expert_kT, self.num_experts)
        load_dE = tf.reshape(rows.load_E, [devices, self.local_experts])
        before_d = tf.cumsum(tf.reduce_sum(load_dE, 1), exclusive=True)
        device_kT = tf.minimum(expert_kT // self.local_experts, devices - 1)
        position_kT = rows.position_kT - tf.gather(before_d, device_kT)
        is_sent_kT = (expert_kT < self.num_experts) & (position_kT < bound)
        slot_kT = tf.where(is_sent_kT, device_kT * bound + position_kT, slots)
        sent_dE = clip_loads(load_dE, bound)
        received_dE = tf.reshape(collectives.all_to_all(sent_dE, self.axes, 0, 1), load_dE.shape)
        expert_C = tf.reshape(_experts_of_sorted(received_dE, bound), [slots])

        def there(rows: tf.Tensor) -> tf.Tensor:
            rows = tf.reshape(rows, [devices, bound, rows.shape[-1]])
            return collectives.all_to_all(rows, self.axes, 0, 1)[0]

        def back(rows: tf.Tensor) -> tf.Tensor:
            sent = collectives.all_to_all(rows[tf.newaxis], self.axes, 1, 0)
            return tf.reshape(sent, rows.shape)

        return Trip(
            *self.by_rows(Permutation(slot_kT, slots), gate_kT, there, back, expert_C),
            lambda: is_sent_kT,
            tf.reduce_sum(load_dE) - tf.reduce_sum(sent_dE),
        )

    def rows_for_device(self, expert_kT: tf.Tensor) -> int:
        """Returns how many of the rows of some tokens a device can send to each device."""
        rows = expert_kT.shape.num_elements()
        return _bounded(self.bound, rows / self.devices, rows)

    def by_rows(
        self,
        permutation: Permutation,
        gate_kT: tf.Tensor,
        there: Move,
        back: Move,
        expert_C: tf.Tensor,
        is_sorted: bool = False,
    ) -> tuple[Move, Callable[[tf.Tensor, NestedMap], tf.Tensor], Move]:
        """Returns the way of rows, one for each choice of a token; see `Trip`.

        Args:
          permutation: the slots of the rows before they are sent.
          there: moves the slots to the devices of their experts.
          expert_C: int32, the number of the expert of each row that arrives; `local_experts` where
            there is none.
          is_sorted: whether rows arrive in the order of their experts.
        """
        codec, sent = self.exchange.codec, gate_kT.shape.num_elements()
        returning = codec.returning or codec
        rows = SortedRows(expert_C[tf.newaxis], self.local_experts, is_sorted)
        return (
            lambda x: _send(permutation.permute(x), there, back, codec, returning),
            lambda x, theta: rows.compute(x, None, self.experts, theta, sent),
            lambda y: permutation.unpermute(_send(y, back, there, returning, codec), gate_kT),
        )


class RaggedExchange(FixedExchange):
    """Sends the rows that there are, without padding."""

    def trip(self, expert_kT: tf.Tensor, gate_kT: tf.Tensor) -> Trip:
        """Sends sorted rows, and their outputs back; see RowExchange."""
        devices, exchange = self.devices, kernels.exchange.exchange
        count = expert_kT.shape.num_elements()
        bound = self.rows_for_device(expert_kT)
        # A device receives at most this many rows.
        slots = devices * bound
        rows = SortedRows(expert_kT, self.num_experts)
        # Loads of each sender's rows, by the device and the number of their expert.
        load_sdE = tf.reshape(
            collectives.all_gather(rows.load_E[tf.newaxis], self.axes, 0),
            [devices, devices, self.local_experts],
        )
        kept_sdE = clip_loads(load_sdE, bound)
        place = collectives.place_along(self.axes)
        to_device_sd, kept_sd = (tf.reduce_sum(x, -1) for x in (load_sdE, kept_sdE))
        end_d = (tf.cumsum(to_device_sd, axis=1, exclusive=True) + kept_sd)[place]
        device_kT = tf.minimum(expert_kT // self.local_experts, devices - 1)
        is_sent_kT = expert_kT < self.num_experts
        is_sent_kT &= rows.position_kT < tf.gather(end_d, device_kT)
        slot_kT = tf.where(is_sent_kT, rows.position_kT, count)
        permutation = Permutation(slot_kT, count, zero_empty=False)
        route = Route.for_loads(load_sdE, kept_sdE, place)
        if platform_in_use() != "tpu":
            route = route.in_parts(-(-LEAST_UPDATES // self.local_experts))
        received_1E = tf.reduce_sum(tf.gather(kept_sdE, place, axis=1), 0, keepdims=True)
        expert_C = _experts_of_sorted(received_1E, slots)[0]
        there = lambda rows: exchange(self.axes, rows, slots, route)  # noqa: E731
        back = lambda rows: exchange(self.axes, rows, count, route.back())  # noqa: E731
        own = tf.gather(load_sdE - kept_sdE, place)
        return Trip(
            *self.by_rows(permutation, gate_kT, there, back, expert_C, is_sorted=True),
            lambda: is_sent_kT,
            tf.reduce_sum(own),
        )


EXCHANGES: dict[str, type[RowExchange]] = {
    "gathered": GatheredExchange,
    "fixed": FixedExchange,
    "ragged": RaggedExchange,
}


def default_exchange(platform: str, devices: int, choices: float, bound: float) -> str:
    """Returns the name of the exchange that a group of devices uses by default.

    On GPUs, XLA's ragged exchange is slow: a step of a model with experts over eight B200 took
    15.6 s with it, and 3.85 s with `gathered`, where experts that are whole on each device took
    3.28 s (https://github.com/marin-community/marin/issues/7012). On eight H100 a layer with 128
    experts, 8 for each token, took 13.1 ms with `gathered` and 12.4 ms with DeepEP
    (https://github.com/marin-community/marin/issues/4311).

    `gathered` receives every token of the group once. `fixed` receives a row for each choice of as
    many tokens as a device has, times `bound`, and moves less in larger groups. Among hosts, tokens
    cross once for all GPUs of a host, over the adapters of all, where each row of an all-to-all
    crosses by its own (https://github.com/NVIDIA/nccl-tests/issues/130). With sums in float32,
    `gathered` is planned faster up to about 5 x `choices` x `bound` devices, and we take it up to 4
    (docs/moe.md). On 64 GB200 `fixed` reached 22.4% of the peak
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
    moves_less = devices <= _HOST or 4 * choices * bound >= devices
    return "gathered" if moves_less or not bound else "fixed"


def exchange_class(
    name: str, platform: str, devices: int, choices: int, bound: float, options: Params, path: str
) -> type[RowExchange]:
    """Returns the class of the exchange of a group of devices.

    Args:
      name: a name in EXCHANGES; "" for the default.
      platform: as in `default_exchange`, as are the next three.
      options: the Params of the layer's `Exchange`.
      path: Params path of the name, for the message.

    Raises:
      UserError: the platform cannot compute the exchange in groups of this size.
    """
    in_steps = options.hierarchical and name == "fixed"
    if devices == 1:
        # Rows are rounded by themselves: the gradients of a token's rows are added afterwards.
        by_row = options.precision and name != "gathered" and not in_steps
        return FixedExchange if by_row else OwnRows
    if in_steps:
        return TwoStepExchange
    name = name or default_exchange(platform, devices, choices, bound)
    if name == "ragged" and hardware_of(platform) == "cuda" and devices > _MOST_RAGGED:
        raise UserError(
            f"{path}='ragged' exchanges rows in groups of {devices} GPUs, but XLA computes it for "
            f"at most {_MOST_RAGGED} (https://github.com/openxla/xla/issues/47283); set it to "
            "'gathered', to 'fixed' with a bound, or to ''"
        )
    return EXCHANGES[name]


def count_devices(axes: Axes) -> int:
    """Returns the number of devices along axes of the mesh; 1 without a mesh."""
    mesh = mesh_in_use()
    return mesh.parts(axes) if mesh else 1


def _bounded(bound: float, even_rows: float, rows: int) -> int:
    """Returns `bound` times the rows under balanced loads, and at most `rows`; 0: all `rows`."""
    return min(random_numbers.ceil(bound * even_rows), rows) if bound else rows


def _experts_of_sorted(load_dE: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns [d,C]: the expert of each row of d sorted buffers; E where there is no row."""
    after_dE = tf.cumsum(load_dE, axis=1)
    is_after_dCE = tf.range(rows)[tf.newaxis, :, tf.newaxis] >= after_dE[:, tf.newaxis]
    return tf.reduce_sum(tf.cast(is_after_dCE, tf.int32), -1)
