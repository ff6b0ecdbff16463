"""Ragged exchange: devices send each other different numbers of rows.

XLA's ragged-all-to-all moves the rows that there are, in arrays with room for more.
Semantics: https://openxla.org/xla/operation_semantics#raggedalltoall.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import msgspec
import numpy as np

from lingvo_gshard.core import custom_gradient, known_sizes
from lingvo_gshard.core.lazy import ir, jax, jax_core, jnp, mlir, stablehlo, tf
from lingvo_gshard.sharding import HARDWARE, collectives, mesh_in_use, platform_in_use
from lingvo_gshard.wings.kernels.kernel import register

LOCAL_LETTERS = {"d": "devices that exchange rows", "r": "rows, with room for more"}

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
    """The rows that a device sends and receives: int32 [d], an entry for each device of its group.

    Attributes:
      first_sent: the first row for each device in this device's rows.
      sent: the number of rows for each device.
      first_there: the place in each device's result where this device's rows begin.
      first_received: the place in this device's result where each device's rows begin.
      received: the number of rows of each device.
      first_of_sender: the first row for this device in each device's rows.
    """

    first_sent: tf.Tensor
    sent: tf.Tensor
    first_there: tf.Tensor
    first_received: tf.Tensor
    received: tf.Tensor
    first_of_sender: tf.Tensor

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
    """Returns the rows [count,M] that this device receives. The others are 0.

    XLA for CPUs has no ragged collective. There an all-gather computes the same.

    Args:
      axes: mesh axes along which devices exchange rows, in a manual region.
      rows_RM: this device's rows.
      count: the number of rows of the result.
      route: the rows that go to and come from each device.
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
    numbers = tf.stack([route.first_sent, route.sent, route.first_there], 1)
    every_dRM = collectives.all_gather(rows_RM[tf.newaxis], axes, 0)
    of_senders_dn = collectives.all_gather(numbers[tf.newaxis], axes, 0)[:, place]
    index_r = tf.range(count)
    result = tf.zeros([count, *rows_RM.shape[1:]], rows_RM.dtype)
    for sender in range(known_sizes(every_dRM.shape)[0]):
        first, size, target = tf.unstack(of_senders_dn[sender])
        is_own_r = (index_r >= target) & (index_r < target + size)
        source_r = tf.where(is_own_r, index_r - target + first, 0)
        sent_rM = tf.gather(every_dRM[sender], source_r)
        result = tf.where(is_own_r[:, tf.newaxis], sent_rM, result)
    return result


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
