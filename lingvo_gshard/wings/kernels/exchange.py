"""Ragged exchange: devices send each other different numbers of rows.

XLA's ragged-all-to-all moves the rows that there are, in arrays with room for more.
Semantics: https://openxla.org/xla/operation_semantics#raggedalltoall.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self, cast

import msgspec
import numpy as np

from lingvo_gshard.core import custom_gradient, jax, jnp, known_sizes, tf
from lingvo_gshard.core.lazy import ir, jax_core, mlir, stablehlo
from lingvo_gshard.sharding import HARDWARE, collectives, mesh_in_use, platform_in_use
from lingvo_gshard.wings.kernels.kernel import register

LOCAL_LETTERS = {
    "d": "devices that exchange rows",
    "s": "the same devices, as senders",
    "e": "experts of all devices, or experts of a device by senders",
    "u": "updates from a device to another",
    "n": "numbers of an update, or updates",
    "p": "ends of an update's parts",
    "r": "rows, with room for more",
}

# Collectives of partitions have a channel. XLA's partitioner gives its own other numbers.
_CHANNEL = 1


class ExchangeCall(msgspec.Struct, frozen=True):
    """The static arguments of an exchange.

    Attributes:
      groups: the partition ids of each group of devices that exchange rows.
      rows: the number of rows that the result has room for.
    """

    groups: tuple[tuple[int, ...], ...]
    rows: int


@dataclasses.dataclass(frozen=True)
class Route:
    """The rows that a device sends and receives: int32 [d*u], u updates for each of d devices.

    Attributes:
      first_sent: the first row of each update in this device's rows.
      sent: the number of its rows.
      first_there: the place in the other device's result where it begins.
      first_received: the place in this device's result where each update for it begins.
      received: the number of its rows.
      first_of_sender: its first row in the other device's rows.
    """

    first_sent: tf.Tensor
    sent: tf.Tensor
    first_there: tf.Tensor
    first_received: tf.Tensor
    received: tf.Tensor
    first_of_sender: tf.Tensor

    @classmethod
    def for_loads(cls, load_sdE: tf.Tensor, kept_sdE: tf.Tensor, place: tf.Tensor) -> Self:
        """Returns the route of one device's rows, which arrive in the order of their experts.

        The rows of an expert are an update. Each sender has `load_sdE` rows for each expert of each
        device, and sends `kept_sdE` of them. This device is the sender `place`.
        """
        devices, _, experts = load_sdE.shape.as_list()
        # Unsent rows stay where they are: at the end of those for their device.
        first_se = tf.cumsum(tf.reshape(load_sdE, [devices, -1]), axis=1, exclusive=True)
        first_sdE = tf.reshape(first_se, load_sdE.shape)
        arriving_de = tf.reshape(tf.transpose(kept_sdE, (1, 2, 0)), [devices, -1])
        target_de = tf.cumsum(arriving_de, axis=1, exclusive=True)
        target_dEs = tf.reshape(target_de, [devices, experts, devices])
        target_sdE = tf.transpose(target_dEs, (2, 0, 1))

        def of_place(x_sdE: tf.Tensor, axis: int) -> tf.Tensor:
            return tf.reshape(tf.gather(x_sdE, place, axis=axis), [-1])

        return cls(
            first_sent=of_place(first_sdE, 0),
            sent=of_place(kept_sdE, 0),
            first_there=of_place(target_sdE, 0),
            first_received=of_place(target_sdE, 1),
            received=of_place(kept_sdE, 1),
            first_of_sender=of_place(first_sdE, 1),
        )

    def in_parts(self, parts: int) -> Route:
        """Returns the route with each update in equal parts."""

        sent_np, received_np = (
            x[:, tf.newaxis] * tf.range(parts + 1) // parts for x in (self.sent, self.received)
        )

        def firsts(first: tf.Tensor, ends_np: tf.Tensor) -> tf.Tensor:
            return tf.reshape(first[:, tf.newaxis] + ends_np[:, :-1], [-1])

        def sizes(ends_np: tf.Tensor) -> tf.Tensor:
            return tf.reshape(ends_np[:, 1:] - ends_np[:, :-1], [-1])

        return Route(
            first_sent=firsts(self.first_sent, sent_np),
            sent=sizes(sent_np),
            first_there=firsts(self.first_there, sent_np),
            first_received=firsts(self.first_received, received_np),
            received=sizes(received_np),
            first_of_sender=firsts(self.first_of_sender, received_np),
        )

    def back(self) -> Route:
        """Returns the route of the rows of the result back to where they came from."""
        return Route(
            self.first_received,
            self.received,
            self.first_of_sender,
            self.first_sent,
            self.sent,
            self.first_there,
        )


def exchange(axes: tuple[str, ...], rows_RM: tf.Tensor, count: int, route: Route) -> tf.Tensor:
    """Returns the rows [count,M] that this device receives on a route. The others are 0.

    Devices along mesh `axes` exchange rows in a manual region. XLA for CPUs has no ragged
    collective. There an all-gather computes the same.
    """
    if platform_in_use() not in HARDWARE:
        return _emulate(axes, rows_RM, count, route)
    return _exchange(_groups(axes), rows_RM, count, route)


def _exchange(
    groups: tuple[tuple[int, ...], ...], rows_RM: tf.Tensor, count: int, route: Route
) -> tf.Tensor:
    @custom_gradient
    def compute(rows: tf.Tensor) -> Any:
        size, *others = known_sizes(rows.shape)
        result = tf.TensorSpec([count, *others], rows.dtype)
        numbers = [route.first_sent, route.sent, route.first_there, route.received]
        (received,) = EXCHANGE.mark(ExchangeCall(groups, count), [rows, *numbers], [result], 1.0)
        return received, lambda d_received: _exchange(groups, d_received, size, route.back())

    return cast(tf.Tensor, compute(rows_RM))


def _groups(axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the partition ids of the devices that differ only along some mesh axes."""
    mesh = mesh_in_use()
    assert mesh is not None
    order = [axis for axis in mesh.names if axis not in axes] + list(axes)
    ids = mesh.ids.transpose([mesh.names.index(axis) for axis in order])
    return tuple(map(tuple, ids.reshape(-1, mesh.parts(axes)).tolist()))


def _emulate(axes: tuple[str, ...], rows_RM: tf.Tensor, count: int, route: Route) -> tf.Tensor:
    """Computes an exchange from the rows of all devices."""
    place = collectives.place_along(axes)
    every_RM = collectives.all_gather(rows_RM, axes, 0)
    size = known_sizes(rows_RM.shape)[0]
    devices = known_sizes(every_RM.shape)[0] // size
    numbers = tf.stack([route.first_sent, route.sent, route.first_there], 1)
    numbers = tf.reshape(numbers, [1, devices, -1, 3])
    numbers_dun = collectives.all_gather(numbers, axes, 0)[:, place]
    first_du, sent_du, target_du = tf.unstack(numbers_dun, axis=-1)
    first_du += size * tf.range(devices)[:, tf.newaxis]
    index_r = tf.range(count)
    after_rdu = index_r[:, tf.newaxis, tf.newaxis] - target_du
    is_own_rdu = (after_rdu >= 0) & (after_rdu < sent_du)
    source_r = tf.reduce_sum(tf.where(is_own_rdu, after_rdu + first_du, 0), [1, 2])
    is_there_r = tf.reduce_any(is_own_rdu, [1, 2])
    return tf.where(is_there_r[:, tf.newaxis], tf.gather(every_RM, source_r), 0)


def _forward(call: ExchangeCall, rows: jax.Array, *numbers: jax.Array) -> tuple:
    result = jnp.zeros((call.rows, *rows.shape[1:]), rows.dtype)
    return (_primitive().bind(rows, result, *numbers, groups=call.groups),)


EXCHANGE = register("exchange", ExchangeCall, tpu=_forward, cuda=_forward)


@functools.cache
def _primitive() -> Any:
    """Returns the collective as a primitive of jax.

    jax.lax.ragged_all_to_all names axes of a mesh, and a kernel's body has none.
    """
    primitive = jax_core.Primitive("ragged_exchange")
    primitive.def_abstract_eval(lambda rows, result, *numbers, groups: result)
    mlir.register_lowering(primitive, _lower)
    return primitive


def _lower(context: Any, rows: Any, result: Any, *numbers: Any, groups: Any) -> Any:
    del context
    # The types of the bindings lack buffers.
    array: Any = np.array(groups, np.int64)
    ids = ir.DenseElementsAttr.get(array)
    channel = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _CHANNEL)
    return stablehlo.CustomCallOp(
        result=[result.type],
        inputs=[rows, result, *numbers],
        call_target_name=ir.StringAttr.get("ragged_all_to_all"),
        backend_config=ir.DictAttr.get({"replica_groups": ids, "channel_id": channel}),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
    ).results
