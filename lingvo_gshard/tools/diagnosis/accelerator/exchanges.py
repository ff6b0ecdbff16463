"""The checks of what devices send each other: exchanges of experts, and ragged rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import NestedMap, context, tf
from lingvo_gshard.layers import Assignment, Exchange, Experts, TokenChoiceRouting
from lingvo_gshard.sharding import annotate, annotate_weights, collectives, manual
from lingvo_gshard.tools.diagnosis.accelerator import trials
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


def check_ragged_rows(machine: trials.Machine) -> Iterator[Check]:
    """Yields the check of the rows that devices send by the ragged collective, with its rate."""
    small = _ragged_rows(machine, 5, 8)
    outcome = trials.run(small, machine, machine.platform)
    timing = None
    if not machine.is_virtual:
        # The sizes of the published measurement that plans take.
        rows = 4096 // machine.count
        timed = trials.run(
            _ragged_rows(machine, rows, 7168, is_even=True), machine, machine.platform
        )
        size = rows * machine.count * 7168 * 2
        timing = timed.timing(
            trials.SENT, trials.measured_point("ragged-all-to-all", size, timed.seconds, machine)
        )
    yield trials.judged(RAGGED_ROWS, outcome, machine.dtype, machine, timing)


def _ragged_rows(
    machine: trials.Machine, most: int, columns: int, is_even: bool = False
) -> trials.Trial:
    """Returns the trial of ragged rows: each device sends each one up to `most`, or as many."""
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
        route = Route(*tf.unstack(tf.gather(tables, collectives.place_along((_AXIS,)))))
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
    return trials.Trial(
        lambda x: [function(x)],
        [rows],
        None if is_even else expected,
        f"{_AXIS}={count}",
        unit=trials.SENT,
    )


def check_exchange(name: str, machine: trials.Machine) -> Iterator[Check]:
    """Yields the check of an exchange: experts split over all devices compute what one computes.

    The rate is of the bytes that a device sends in a forward pass, moves of rows included.
    """
    small = _ExchangedExperts(machine, "float32")
    outcome, timing = trials.run(small.trial(NAMES[name]), machine, machine.platform), None
    if not machine.is_virtual:
        large = _ExchangedExperts(machine, machine.dtype, 4096, 4096, 256, is_timed=True)
        timing = trials.run(large.trial(NAMES[name]), machine, machine.platform).timing(trials.SENT)
    yield trials.judged(name, outcome, small.dtype, machine, timing)


@dataclasses.dataclass(frozen=True)
class _ExchangedExperts:
    """Experts split over all devices, each with a group of tokens. `is_timed` needs no results."""

    machine: trials.Machine
    dtype: str
    tokens: int = 8
    model_dim: int = 128
    hidden_dim: int = 128
    is_timed: bool = False

    def trial(self, exchange: str) -> trials.Trial:
        """Returns the trial of an exchange."""
        draw, dtype = np.random.default_rng(1), np.dtype(self.dtype)
        specs = self._experts.variable_specs()
        theta = specs.transform(lambda s: (0.3 * draw.normal(size=s.shape)).astype(dtype))
        shape = (self.machine.count, self.tokens)
        x_GSM = draw.normal(size=(*shape, self.model_dim)).astype(dtype)
        gate_KGS = draw.random((_CHOICES, *shape)).astype(np.float32)

        def on_mesh(theta: NestedMap, x_GSM: tf.Tensor, gate_KGS: tf.Tensor) -> list[Any]:
            theta, x_GSM = annotate_weights(theta, specs), annotate(x_GSM, "GSM")
            return self._compute(exchange, theta, x_GSM, gate_KGS)

        def expected() -> list[np.ndarray]:
            given = theta.transform(tf.constant), tf.constant(x_GSM), tf.constant(gate_KGS)
            return [x.numpy() for x in self._compute("", *given)]

        wanted, mesh = None if self.is_timed else expected, f"{_AXIS}={self.machine.count}"
        return trials.Trial(on_mesh, [theta, x_GSM, gate_KGS], wanted, mesh, _STRATEGY, trials.SENT)

    @functools.cached_property
    def _experts(self) -> Experts:
        sizes = {"model_dim": self.model_dim, "hidden_dim": self.hidden_dim}
        params = Experts.params().set(**sizes, num_experts=self._count, activation="swiglu")
        return params.instantiate(path="moe.experts")

    @property
    def _count(self) -> int:
        return 2 * self.machine.count

    def _routing(self, gates: Sequence[tf.Tensor]) -> TokenChoiceRouting:
        """Returns choices of experts. Later experts have fewer rows, unless it is timed."""
        shape = (self.machine.count, self.tokens)
        drawn = np.random.default_rng(2).integers(0, self._count, (2, _CHOICES, *shape))
        expert_KGS = (drawn[0] if self.is_timed else drawn.min(0)).astype(np.int32)
        kept, position = tf.ones(shape, tf.bool), tf.zeros(shape, tf.int32)
        assignments = tuple(
            Assignment(tf.constant(expert), position, gate, kept, tf.cast(kept, tf.float32))
            for expert, gate in zip(expert_KGS, gates, strict=True)
        )
        return TokenChoiceRouting(assignments, self._count, self.tokens)

    def _compute(
        self, name: str, theta: NestedMap, x_GSM: tf.Tensor, gate_KGS: tf.Tensor
    ) -> list[Any]:
        """Returns the outputs of the experts, and the gradients of all that is given."""
        dispatch = DroplessDispatch.params().set(exchange=name).instantiate(path="moe.dispatch")
        exchange = Exchange.params().instantiate(path="moe.exchange")
        sources = [x_GSM, gate_KGS, *theta.flatten()]
        with tf.GradientTape() as tape, context.scope(training=True, seed=None):
            tape.watch(sources)
            routing = self._routing(tf.unstack(gate_KGS))
            y_GSM = dispatch.run(routing, x_GSM, self._experts, theta, exchange)
        return [y_GSM] if self.is_timed else [y_GSM, *tape.gradient([y_GSM], sources, [x_GSM])]
