"""Ring attention by the platform's fused kernel: one call for the keys of each device.

In step t, device i attends to the keys of device i - t. Outputs are joined by the logs of their
softmax' sums, and the backward pass computes each part's gradients from the sums of all keys (Liu
et al. 2023, arXiv 2310.01889, section 3; Dao et al. 2022, arXiv 2205.14135, appendix B).

If every device had consecutive positions of a causal row, the last device would compute in all
steps, and the first one in one. A balanced ring therefore cuts the row into 2n chunks, and gives
device i the chunks 2i and 2n - 1 - 2i, an early and a late one (as Llama 3 does with its chunks i
and 2n - 1 - i: arXiv 2407.21783, section 3.3.2). A device that keeps its first half and exchanges
the second with the device at the mirrored place has these chunks. Then each step after the first
hides exactly half of all pairs: the late keys of a device with an earlier early chunk, or the early
queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.sharding import collectives
from lingvo_gshard.wings.kernels import attention
from lingvo_gshard.wings.kernels.call import AttentionCall, Operands

Tensors: TypeAlias = "Sequence[tf.Tensor]"
# Positions of a device. In a balanced ring it has an early and a late half.
Half: TypeAlias = Literal["all", "early", "late"]

# The log of a sum over no key. The sum of two of them is finite.
_NOTHING = -1e30


class Block(NamedTuple):
    """One call of the kernel.

    Attributes:
      queries: which queries of this device attend.
      keys: which keys of the other device they attend to.
    """

    queries: Half
    keys: Half
    call: AttentionCall


class Step(NamedTuple):
    """The calls that a device may make with the keys of another.

    Attributes:
      before: the call if these keys come before the device's own; None if all are hidden.
      behind: the call if they come after them; None if all are hidden.
    """

    before: Block | None
    behind: Block | None


@dataclasses.dataclass(frozen=True)
class FusedRing:
    """Ring attention on the shards of devices, for a manual region.

    Attributes:
      call: the static arguments. Causal rows and windows have as many keys as queries.
      axis: mesh axis that splits positions.
      devices: number of devices along the axis.
      length: queries of a device.
      is_balanced: whether a device has an early and a late chunk of a causal row.
    """

    call: AttentionCall
    axis: str
    devices: int
    length: int
    is_balanced: bool

    def steps(self) -> list[Step]:
        """Returns the steps after the first one, up to the last that any device computes."""
        call = msgspec.structs.replace(self.call, has_sinks=False)
        if self.is_balanced:
            seen = msgspec.structs.replace(call, is_causal=False)
            step = Step(Block("all", "early", seen), Block("late", "all", seen))
            return [step] * (self.devices - 1)
        found = [
            Step(*(self._at(call, t * self.length) for t in (step, step - self.devices)))
            for step in range(1, self.devices)
        ]
        while found and found[-1] == (None, None):
            found.pop()
        return found

    def _at(self, call: AttentionCall, distance: int) -> Block | None:
        """Returns the call of queries that stand so many positions after the keys of a device."""
        if call.is_causal and distance < 0:
            return None
        nearest, farthest = abs(distance) - self.length + 1, abs(distance) + self.length - 1
        if call.window and nearest > call.window:
            return None
        call = msgspec.structs.replace(call, is_causal=False)
        if call.window and farthest > call.window:
            call = msgspec.structs.replace(call, first_query=distance)
        else:
            call = msgspec.structs.replace(call, window=0)
        return Block("all", "all", call)

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        integers: Tensors,
        sinks: Tensors,
    ) -> tf.Tensor:
        """Returns the outputs [B,N,L,D] of this device's queries.

        Args:
          query_BNLD: this device's queries, already scaled.
          integers: this device's parts of the `integers` of `kernels.attention.attend`.
          sinks: float32 logits [N], if the call has them.
        """

        @custom_gradient
        def compute(*operands: tf.Tensor) -> Any:
            mixed_BNLD, log_sums_BNL = self._forward(operands)

            def gradient(d_mixed_BNLD: tf.Tensor) -> list[tf.Tensor | None]:
                found = self._backward(operands, mixed_BNLD, log_sums_BNL, d_mixed_BNLD)
                return [*found[:3], *[None] * len(integers), *found[3:]]

            return mixed_BNLD, gradient

        given = Operands.of(self.call, (query_BNLD, keys_BNKD, values_BNKD, *integers, *sinks))
        arrays = [self._exchanged(x, 2) for x in (given.query, given.keys, given.values)]
        segments = [self._exchanged(x, 1) for x in given.segments]
        mixed_BNLD = compute(*arrays, *segments, *self._exchanged_terms(given), *sinks)
        return self._restored(mixed_BNLD, 2)

    def _forward(self, operands: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the outputs, and the float32 log [B,N,L] of the sums over all keys."""
        mixed, log_sums = attention.attend_with_sums(self.call, operands)
        sums = tf.cast(mixed, tf.float32), tf.maximum(log_sums, _NOTHING)
        query, moving = operands[0], self._moving(operands)
        for number, step in enumerate(self.steps(), 1):
            moving = [collectives.rotate(x, self.axis) for x in moving]
            here = moving

            def attend(block: Block | None, here: Tensors = here) -> list[tf.Tensor]:
                return self._attend(block, operands, here)

            sums = _joined(sums, self._either(number, step, attend))
        return tf.cast(sums[0], query.dtype), sums[1]

    def _backward(
        self, operands: Tensors, mixed: tf.Tensor, log_sums: tf.Tensor, d_mixed: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients of queries, keys, values and sinks.

        The gradients of keys and values move on with them, and in the end back to their devices.
        """
        results = (mixed, log_sums, d_mixed)
        own = attention.gradients(self.call, operands, *results)
        d_query, *d_moving = (tf.cast(x, tf.float32) for x in own[:3])
        moving, steps = self._moving(operands), self.steps()
        for number, step in enumerate(steps, 1):
            moving, d_moving = (
                [collectives.rotate(x, self.axis) for x in each] for each in (moving, d_moving)
            )
            here = moving

            def differentiate(block: Block | None, here: Tensors = here) -> list[tf.Tensor]:
                return self._differentiate(block, operands, here, results)

            found = self._either(number, step, differentiate)
            d_query += found[0]
            d_moving = [d + x for d, x in zip(d_moving, found[1:], strict=True)]
        back = self.devices - len(steps)
        d_moving = [collectives.rotate(x, self.axis, back) for x in d_moving]
        pairs = zip((d_query, *d_moving), operands[:3], strict=True)
        return [*(tf.cast(d, x.dtype) for d, x in pairs), *own[3:]]

    def _moving(self, operands: Tensors) -> list[tf.Tensor]:
        """Returns what passes around the ring: keys, values, their segments and dropout's terms."""
        named = Operands.of(self.call, operands)
        terms = [] if named.dropout is None else [named.dropout.keys]
        return [named.keys, named.values, *named.segments[1:], *terms]

    def _either(
        self, number: int, step: Step, compute: Callable[[Block | None], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns what this device computes in a step."""
        if step.before == step.behind:
            return compute(step.before)
        index = collectives.axis_index(self.axis)
        is_before = index >= number
        if self.is_balanced:
            other = tf.math.floormod(index - number, self.devices)
            is_before = self._early(other) < self._early(index)
        before, behind = (lambda block=block: compute(block) for block in step)
        return cast(list[tf.Tensor], tf.cond(is_before, before, behind))

    def _attend(self, block: Block | None, operands: Tensors, here: Tensors) -> list[tf.Tensor]:
        """Returns float32 outputs [B,N,L,D] over the keys of a block, and the logs of their sums.

        A block is None if all keys are hidden. `here` is what this device has of the ring.
        """
        query, values = operands[0], here[1]
        shape = [*known_sizes(query.shape)[:3], known_sizes(values.shape)[3]]
        if block is None:
            return [tf.zeros(shape), tf.fill(shape[:3], _NOTHING)]
        mixed, log_sums = attention.attend_with_sums(
            block.call, self._operands(block, operands, here)
        )
        mixed, log_sums = tf.cast(mixed, tf.float32), tf.maximum(log_sums, _NOTHING)
        return [_widened(mixed, block.queries), _widened(log_sums, block.queries, _NOTHING)]

    def _differentiate(
        self, block: Block | None, operands: Tensors, here: Tensors, results: Tensors
    ) -> list[tf.Tensor]:
        """Returns float32 gradients of the queries, and of the keys and values at this device.

        The results are outputs and logs of the sums over all keys, and the gradient of the outputs.
        `_attend` takes the other arguments, too.
        """
        if block is None:
            return [tf.zeros(x.shape) for x in (operands[0], *here[:2])]
        found = attention.gradients(
            block.call,
            self._operands(block, operands, here),
            *(_half(x, block.queries, 2) for x in results),
        )
        halves = (block.queries, block.keys, block.keys)
        pairs = zip(found, halves, strict=True)
        return [_widened(tf.cast(x, tf.float32), half) for x, half in pairs]

    def _operands(self, block: Block, operands: Tensors, here: Tensors) -> list[tf.Tensor]:
        """Returns the operands of a call: queries of this device, and keys that are here."""
        named, keys = Operands.of(self.call, operands), here[:2]
        found = [_half(named.query, block.queries, 2), *(_half(x, block.keys, 2) for x in keys)]
        if named.segments:
            found += [_half(named.segments[0], block.queries, 1), _half(here[2], block.keys, 1)]
        if named.dropout is not None:
            terms = _half(named.dropout.queries, block.queries, 0), _half(here[-1], block.keys, 0)
            found += named.dropout._replace(queries=terms[0], keys=terms[1])
        return found

    def _early(self, index: tf.Tensor) -> tf.Tensor:
        """Returns the number of the early chunk of a device."""
        return tf.minimum(2 * index, 2 * self.devices - 1 - 2 * index)

    def _exchanged(self, x: tf.Tensor, dimension: int) -> tf.Tensor:
        """Returns the early and the late chunk of this device, from consecutive positions."""
        if not self.is_balanced:
            return x
        first, second = tf.split(x, 2, dimension)
        return self._ordered(first, collectives.mirror(second, self.axis), dimension)

    def _exchanged_terms(self, given: Operands) -> Tensors:
        """Returns the operands of dropout for the positions that `_exchanged` gives a device."""
        dropout = given.dropout
        if dropout is None:
            return ()
        queries, keys = (self._exchanged(x, 0) for x in (dropout.queries, dropout.keys))
        return dropout._replace(queries=queries, keys=keys)

    def _restored(self, x: tf.Tensor, dimension: int) -> tf.Tensor:
        """Reverses `_exchanged`."""
        if not self.is_balanced:
            return x
        early, late = tf.split(x, 2, dimension)
        first, second = tf.split(self._ordered(early, late, dimension), 2, dimension)
        return tf.concat([first, collectives.mirror(second, self.axis)], dimension)

    def _ordered(self, first: tf.Tensor, second: tf.Tensor, dimension: int) -> tf.Tensor:
        """Returns both halves, swapped on devices whose own chunk is the late one."""
        is_early = 2 * collectives.axis_index(self.axis) < self.devices
        halves = tf.where(is_early, first, second), tf.where(is_early, second, first)
        return tf.concat(halves, dimension)


def _joined(one: Tensors, other: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns float32 outputs [B,N,L,D] and logs [B,N,L] of sums over the keys of both."""
    largest = tf.maximum(one[1], other[1])
    log_sums = largest + tf.math.log(tf.exp(one[1] - largest) + tf.exp(other[1] - largest))
    parts = (x * tf.exp(part - log_sums)[..., None] for x, part in (one, other))
    return cast(tf.Tensor, sum(parts)), log_sums


def _half(x: tf.Tensor, half: Half, dimension: int) -> tf.Tensor:
    """Returns the early or the late half of positions, or all of them."""
    if half == "all":
        return x
    return tf.split(x, 2, dimension)[half == "late"]


def _widened(x: tf.Tensor, half: Half, value: float = 0.0) -> tf.Tensor:
    """Returns [B,N,L,...] with all positions: a half has the given values, the rest `value`."""
    if half == "all":
        return x
    rest = tf.fill(x.shape, value)
    return tf.concat([x, rest] if half == "early" else [rest, x], 2)
