"""The checks of what devices send each other: exchanges of experts, and ragged rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import Experts
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.routing import Assignment, TokenChoiceRouting
from lingvo_gshard.sharding import annotate, annotate_weights, manual
from lingvo_gshard.sharding.collectives import place_along
from lingvo_gshard.tools.diagnosis.accelerator.trials import (
    SENT,
    Machine,
    Trial,
    judged,
    measured_point,
    run,
)
from lingvo_gshard.tools.diagnosis.environment import Check
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.dropless.exchanges import EXCHANGES
from lingvo_gshard.wings.kernels.exchange import Route

_STRATEGY, _AXIS = "expert", "data"
_CHOICES = 2
# Names of checks of exchanges -> the exchange. New ones take part by their place in the table.
PREFIX = "exchange, "
NAMES = {f"{PREFIX}{name}": name for name in EXCHANGES}
RAGGED_ROWS = "ragged rows"


def check_ragged_rows(machine: Machine) -> Iterator[Check]:
    """Yields the check of the rows that devices send by the ragged collective, with its rate."""
    small = _ragged_rows(machine, 5, 8)
    outcome = run(small, machine, machine.platform)
    timing = None
    if not machine.is_virtual:
        # The sizes of the published measurement that plans take.
        rows = 4096 // machine.count
        timed = run(_ragged_rows(machine, rows, 7168, is_even=True), machine, machine.platform)
        size = rows * machine.count * 7168 * 2
        timing = timed.timing(
            SENT, measured_point("ragged-all-to-all", size, timed.seconds, machine)
        )
    yield judged(RAGGED_ROWS, outcome, machine.dtype, machine, timing)


def _ragged_rows(machine: Machine, most: int, columns: int, is_even: bool = False) -> Trial:
    """Returns the trial of rows, of which each device sends 0 to `most` to each, or all `most`."""
    count = machine.count
    sends = np.full((count, count), most, np.int32)
    if not is_even:
        sends = (np.arange(count)[:, None] * 3 + np.arange(count)) % (most + 1)
    sends = sends.astype(np.int32)
    room = most * count
    first_sent = np.cumsum(sends, 1, dtype=np.int32) - sends
    first_there = np.cumsum(sends, 0, dtype=np.int32) - sends
    table = [first_sent, sends, first_there, first_there.T, sends.T, first_sent.T]
    tables = np.stack(table).swapaxes(0, 1).astype(np.int32)
    rows = np.arange(count * room * columns).reshape(count * room, columns) % 251
    rows = rows.astype(np.dtype(machine.dtype))

    def on_device(rows_RM: tf.Tensor) -> tf.Tensor:
        route = Route(*tf.unstack(tf.gather(tables, place_along((_AXIS,)))))
        return kernels.exchange.exchange((_AXIS,), rows_RM, room, route)

    def expected() -> list[np.ndarray]:
        received = np.zeros(rows.shape, np.float64)
        for sender, target in np.ndindex(count, count):
            start = sender * room + first_sent[sender, target]
            there = target * room + first_there[sender, target]
            size = sends[sender, target]
            received[there : there + size] = rows[start : start + size]
        return [received]

    split = ((_AXIS,), ())
    function = manual(on_device, [split], split)
    return Trial(
        lambda x: [function(x)],
        [rows],
        None if is_even else expected,
        f"{_AXIS}={count}",
        unit=SENT,
    )


def check_exchange(name: str, machine: Machine) -> Iterator[Check]:
    """Yields the check of an exchange: experts split over all devices compute what one computes.

    The rate is of the bytes that a device sends in a forward pass, moves of rows included.
    """
    dtype = "float32"
    outcome = run(_experts(NAMES[name], machine, (8, 128, 128), dtype), machine, machine.platform)
    timing = None
    if not machine.is_virtual:
        sizes = (4096, 4096, 256)
        trial = _experts(NAMES[name], machine, sizes, machine.dtype, is_timed=True)
        timing = run(trial, machine, machine.platform).timing(SENT)
    yield judged(name, outcome, dtype, machine, timing)


def _experts(
    name: str, machine: Machine, sizes: tuple[int, int, int], dtype: str, is_timed: bool = False
) -> Trial:
    """Returns the trial of experts whose tokens are exchanged.

    Args:
      name: the exchange.
      machine: the devices, which have a group of tokens each.
      sizes: tokens of a group, model and hidden dimension.
      dtype: type of the tokens and the weights.
      is_timed: whether only the time of the forward pass is of interest.
    """
    count, (tokens, model_dim, hidden_dim) = machine.count, sizes
    params = Experts.params().set(
        model_dim=model_dim, hidden_dim=hidden_dim, num_experts=2 * count, activation="swiglu"
    )
    experts = params.instantiate(path="moe.experts")
    specs = experts.variable_specs()
    draw = np.random.default_rng(1)
    theta = specs.transform(lambda s: (0.3 * draw.normal(size=s.shape)).astype(np.dtype(dtype)))
    x_GSM = draw.normal(size=(count, tokens, model_dim)).astype(np.dtype(dtype))
    gate_KGS = draw.random((_CHOICES, count, tokens)).astype(np.float32)
    # Later experts have fewer rows.
    drawn = draw.integers(0, 2 * count, (2, _CHOICES, count, tokens)).astype(np.int32)
    expert_KGS = drawn[0] if is_timed else drawn.min(0)
    dispatch = DroplessDispatch.params().set(exchange=name).instantiate(path="moe.dispatch")
    alone = DroplessDispatch.params().instantiate(path="moe.dispatch")
    kept_GS = np.ones((count, tokens), bool)

    def route(gates: list[tf.Tensor]) -> TokenChoiceRouting:
        kept, position = tf.constant(kept_GS), tf.zeros((count, tokens), tf.int32)
        assignments = tuple(
            Assignment(tf.constant(e), position, gate, kept, tf.cast(kept, tf.float32))
            for e, gate in zip(expert_KGS, gates, strict=True)
        )
        return TokenChoiceRouting(assignments, 2 * count, tokens)

    def compute(theta: object, x_GSM: tf.Tensor, gate_KGS: tf.Tensor, own: object = dispatch):
        exchange = Exchange.params().instantiate(path="moe.exchange")
        sources = [x_GSM, gate_KGS, *theta.flatten()]
        with tf.GradientTape() as tape, context.scope(training=True, seed=None):
            tape.watch(sources)
            routing = route(tf.unstack(gate_KGS))
            y_GSM = own.run(routing, x_GSM, experts, theta, exchange)
        return [y_GSM] if is_timed else [y_GSM, *tape.gradient(y_GSM, sources, x_GSM)]

    def on_mesh(theta, x_GSM, gate_KGS):
        return compute(annotate_weights(theta, specs), annotate(x_GSM, "GSM"), gate_KGS)

    def expected() -> list[np.ndarray]:
        given = theta.transform(tf.constant), tf.constant(x_GSM), tf.constant(gate_KGS)
        return [x.numpy() for x in compute(*given, own=alone)]

    return Trial(
        on_mesh,
        [theta, x_GSM, gate_KGS],
        None if is_timed else expected,
        f"{_AXIS}={count}",
        _STRATEGY,
        SENT,
    )
