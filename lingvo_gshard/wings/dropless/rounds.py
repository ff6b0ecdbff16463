"""Rounds: an exchange is repeated for the rows that its buffers did not hold.

Buffers have room for a multiple of a balanced load. A first round computes the rows that they hold.
A loop computes the other rows, in buffers of the same size. All devices run equally many rounds,
since each round adds up the rows that are left on any device. Usually there is no further round.

In the loop, a barrier ties what is exchanged to the number of the round: XLA would exchange tokens
before the loop otherwise, since they are the same in each round.

The gradient computes each further round once more, so that nothing of unknown size is saved. The
loop begins with the gradients of the first round and adds to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import (
    Context,
    NestedMap,
    context,
    custom_gradient,
    optimization_barrier,
    random_numbers,
    scopes,
    tf,
)
from lingvo_gshard.sharding import collectives
from lingvo_gshard.wings.dropless.exchanges import Axes, RowExchange

LOCAL_LETTERS = {"k": "choices of a token"}

_FURTHER_ROUNDS = scopes.loop_name(0)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of one device's tokens, in a manual region.

    Attributes:
      group_axes: mesh axes that split the groups.
    """

    exchange: RowExchange
    group_axes: Axes
    theta: NestedMap
    context: Context = dataclasses.field(default_factory=context.current)

    def compute(
        self, x_TM: tf.Tensor, expert_kT: tf.Tensor, gate_kT: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes all rows of the device's tokens; see `RowExchange.compute`.

        Returns:
          [T,M], the gate-weighted sums; and the number of rows that the first round left on all
          devices, a float32 scalar.
        """

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            # Hidden from outer tapes: a loop that two tapes watch needs a gradient of its own.
            sources = [tf.stop_gradient(x) for x in tensors]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                first_TM, left = self._run(expert_kT, sources)
            over_bound = collectives.psum(left, self.group_axes)

            def add_round(index: tf.Tensor, before_kT: tf.Tensor, y_TM: tf.Tensor, left) -> tuple:
                left_kT = self.exchange.left(before_kT)
                (index,), inner = optimization_barrier([index], sources)
                more_TM, left = self._further(index, left_kT, inner)
                return index + 1, left_kT, y_TM + more_TM, collectives.psum(left, self.group_axes)

            start = (tf.constant(1), expert_kT, first_TM, over_bound)
            goes_on: Callable = lambda index, before_kT, y_TM, left: left > 0  # noqa: E731
            rounds, _, y_TM, _ = tf.while_loop(goes_on, add_round, start, name=_FURTHER_ROUNDS)

            def gradient(d_y_TM: tf.Tensor, d_over_bound: tf.Tensor) -> list[tf.Tensor]:
                del d_over_bound
                first = _gradients(tape, first_TM, sources, d_y_TM)
                return self._add_gradients(rounds, expert_kT, sources, d_y_TM, first)

            return (y_TM, over_bound), gradient

        return compute(x_TM, gate_kT, *tf.nest.flatten(self.theta))

    def _add_gradients(
        self,
        rounds: tf.Tensor,
        expert_kT: tf.Tensor,
        sources: Sequence[tf.Tensor],
        d_y_TM: tf.Tensor,
        first: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the sums of the gradients of all rounds.

        Args:
          expert_kT: the experts of all choices.
          sources: the tokens, gates and weights.
          first: the gradients of the sources in the first round.
        """

        def add_round(index: tf.Tensor, before_kT: tf.Tensor, sums: list[tf.Tensor]) -> tuple:
            left_kT = self.exchange.left(before_kT)
            (index, d_TM), inner = optimization_barrier([index, d_y_TM], sources)
            with tf.GradientTape() as tape:
                tape.watch(inner)
                y_TM, _ = self._further(index, left_kT, inner)
            found = _gradients(tape, y_TM, inner, d_TM)
            return index + 1, left_kT, [x + d for x, d in zip(sums, found, strict=True)]

        start = (tf.constant(1), expert_kT, first)
        goes_on: Callable = lambda index, before_kT, sums: index < rounds  # noqa: E731
        return tf.while_loop(goes_on, add_round, start, name=_FURTHER_ROUNDS)[2]

    def _further(
        self, index: tf.Tensor, expert_kT: tf.Tensor, sources: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of a further round, and the number of this device's rows left then.

        Dropout draws other random numbers in each round. Remat units save nothing.
        """
        part = self.context.part(self.context.iteration)
        part.saved_products, part.is_recomputing = None, True
        if part.seed is not None:
            part.seed = random_numbers.hashed_fold_in_word(part.seed, index)
        with context.use(part):
            return self._run(expert_kT, sources)

    def _run(
        self, expert_kT: tf.Tensor, sources: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of the choices that a round computes, and the number of rows left."""
        x_TM, gate_kT, *weights = sources
        theta = tf.nest.pack_sequence_as(self.theta, weights)
        return self.exchange.compute(x_TM, expert_kT, gate_kT, theta)


def _gradients(
    tape: tf.GradientTape, y: tf.Tensor, sources: Sequence[tf.Tensor], d_y: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the gradients of a recorded result with respect to its sources, dense."""
    upstream: Any = d_y
    found = tape.gradient(
        y,
        list(sources),
        output_gradients=upstream,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return [tf.convert_to_tensor(x) for x in found]
