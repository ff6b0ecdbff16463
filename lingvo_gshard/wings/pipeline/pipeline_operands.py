"""The schedule of a pipeline, and the operands that its stages read in each tick.

An operand is read for all stages at once, as a stack [P,...]. The gradients of the reads are added
up over the ticks.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import VariableSpec, tf
from lingvo_gshard.sharding import annotate_like


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Has all P stages compute in every tick, each one tick after the previous stage.

    With one circulation this is the forward half of GPipe (Huang et al. 2018, arXiv 1811.06965,
    section 2.3): stage s computes micro-batch i in tick i + s. With several circulations a stage
    has several chunks of layers, and a micro-batch that leaves the last stage returns to the first
    one (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """

    stages: int
    micro_batches: int
    circulations: int = 1

    @property
    def ticks(self) -> int:
        """Number of ticks until all micro-batches have passed all stages."""
        return self.micro_batches * self.circulations + self.stages - 1

    @property
    def idle_share(self) -> float:
        """Fraction of a stage's ticks without a micro-batch (the bubble)."""
        return (self.stages - 1) / self.ticks

    def micro_batch(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns the int32 index [P] of each stage's micro-batch; arbitrary for idle stages."""
        return tf.math.floormod(self._ticks_since_entry(tick), self.micro_batches)

    def circulation(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns the int32 circulation [P] that each stage computes; arbitrary for idle ones."""
        return self._clip_circulation(self._ticks_since_entry(tick))

    def newest_circulation(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns the circulation of the first stage; other stages have it or the previous one."""
        return self._clip_circulation(tick)

    def _clip_circulation(self, ticks_since_entry: tf.Tensor) -> tf.Tensor:
        circulation = ticks_since_entry // self.micro_batches
        return tf.clip_by_value(circulation, 0, self.circulations - 1)

    def _ticks_since_entry(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns the ticks [P] since the first micro-batch reached each stage; negative before."""
        return tick - tf.range(self.stages)

    def busy_ticks(self) -> np.ndarray:
        """Returns the tick of each stage for each micro-batch, [circulations, P, micro_batches]."""
        entry = np.arange(self.circulations * self.micro_batches)
        entry = entry.reshape(self.circulations, 1, self.micro_batches)
        return entry + np.arange(self.stages)[None, :, None]


LOCAL_LETTERS = {"m": "micro-batches"}

Sums: TypeAlias = "tf.Tensor | tf.TensorArray"


class Operand(abc.ABC):
    """Base of operands whose gradients are added to their sums one by one."""

    def begin_tick(self, sums: Sums) -> Sums:
        """Returns what the gradients of a tick are added to."""
        return sums

    def end_tick(self, sums: Sums, total: Sums) -> Sums:
        """Returns the sums after a tick, whose last `add` returned `total`."""
        del sums
        return total

    @abc.abstractmethod
    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        """Returns the values [P,...] that stages read in tick t, in run r of the body."""

    @abc.abstractmethod
    def zero_sums(self) -> Sums:
        """Returns the sums before the first tick."""

    @abc.abstractmethod
    def add(self, total: Any, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor) -> Sums:
        """Adds the gradients d [P,...] of a read to the total of `begin_tick` or the last `add`."""

    @abc.abstractmethod
    def gradient(self, sums: Any) -> tf.Tensor:
        """Returns the gradient of the operand."""


def _array_of(zeros: tf.Tensor) -> tf.TensorArray:
    array = tf.TensorArray(tf.float32, zeros.shape[0], element_shape=zeros.shape[1:])
    return array.unstack(zeros)


@dataclasses.dataclass(frozen=True)
class MicroBatchOperand(Operand):
    """A tensor [m,B,...] of all micro-batches. A stage reads its current part.

    In tick t all stages add their gradients at index t modulo the number of micro-batches,
    regardless of their micro-batch. An index that differs between stages would need communication.
    `gradient` puts the sums in order.
    """

    tensor: tf.Tensor
    schedule: Schedule

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        del r
        return tf.gather(self.tensor, self.schedule.micro_batch(t))

    def zero_sums(self) -> tf.TensorArray:
        """Returns an array of float32 sums [P,B,...], one for each micro-batch."""
        count, *shape = self.tensor.shape
        return _array_of(tf.zeros([count, self.schedule.stages, *shape]))

    def add(
        self, total: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor
    ) -> tf.TensorArray:
        del r
        index = tf.math.floormod(t, self.schedule.micro_batches)
        return total.write(index, total.read(index) + tf.cast(d, tf.float32))

    def gradient(self, sums: tf.TensorArray) -> tf.Tensor:
        micro_batches, stages = np.ogrid[: self.schedule.micro_batches, : self.schedule.stages]
        indices = (micro_batches + stages) % self.schedule.micro_batches
        order = [1, 0, *range(2, self.tensor.shape.rank + 1)]
        by_stage = tf.gather(tf.transpose(sums.stack(), order), indices.T, batch_dims=1)
        return tf.cast(tf.reduce_sum(by_stage, 0), self.tensor.dtype)


@dataclasses.dataclass(frozen=True)
class WeightOperand(Operand):
    """A stack of weights [P,R,...]. A stage reads the weight of the layer that it runs next.

    R counts the layers of a stage, which runs its body `per_tick` times in a tick.

    The circulations of two stages differ by at most one. In every tick, all stages therefore read
    and write the same two indices along R, and each stage selects one. An index that differs
    between stages would make XLA communicate weights.
    """

    weight: tf.Tensor
    spec: VariableSpec
    schedule: Schedule
    per_tick: int

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        (index, _), *alternatives = self._candidates(t, r)
        selected = self._at(index)
        for index, is_selected in alternatives:
            selected = tf.where(is_selected, self._at(index), selected)
        return annotate_like(selected, self._spec_with("P"))

    def zero_sums(self) -> tf.TensorArray:
        """Returns an array of float32 sums [P,...], one for each layer of a stage."""
        return _array_of(self._zeros())

    def add(
        self, total: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor
    ) -> tf.TensorArray:
        d = tf.cast(annotate_like(d, self._spec_with("P")), tf.float32)
        for index, is_selected in self._candidates(t, r):
            total = total.write(index, total.read(index) + tf.where(is_selected, d, 0.0))
        return total

    def gradient(self, sums: Sums) -> tf.Tensor:
        """Returns the gradient [P,R,...] of the weight, from the sums [R,P,...]."""
        by_layer = sums if isinstance(sums, tf.Tensor) else sums.stack()
        by_layer = annotate_like(by_layer, self._spec_with("RP"))
        order = [1, 0, *range(2, by_layer.shape.rank)]
        gradient = tf.cast(tf.transpose(by_layer, order), self.weight.dtype)
        return annotate_like(gradient, self._spec_with("PR"))

    def _zeros(self) -> tf.Tensor:
        """Returns float32 zeros [R,P,...], split as the weights are."""
        stages, layers, *shape = self.weight.shape
        return annotate_like(tf.zeros([layers, stages, *shape]), self._spec_with("RP"))

    def _candidates(self, t: tf.Tensor, r: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns indices along R, each with the stages [P,1,...] that run this layer now."""
        newest = self.schedule.newest_circulation(t)
        ones = [1] * (self.weight.shape.rank - 2)
        is_newest = tf.reshape(tf.equal(self.schedule.circulation(t), newest), [-1, *ones])
        candidates = [(newest * self.per_tick + r, is_newest)]
        if self.schedule.circulations > 1:
            previous = tf.maximum(newest - 1, 0)
            candidates.append((previous * self.per_tick + r, ~is_newest))
        return candidates

    def _at(self, index: tf.Tensor) -> tf.Tensor:
        stages, _, *shape = self.weight.shape
        start = [0, index] + [0] * len(shape)
        return tf.squeeze(tf.slice(self.weight, start, [stages, 1, *shape]), 1)

    def _spec_with(self, stack: str) -> VariableSpec:
        """Returns the spec with stack letters before its own; only P of them can be split."""
        unsplit = self.spec.unsplit + stack.replace("P", "")
        return dataclasses.replace(self.spec, layout=stack + self.spec.layout, unsplit=unsplit)


@dataclasses.dataclass(frozen=True)
class WeightOnce(WeightOperand):
    """A stack of weights that every stage reads once a tick, layer by layer.

    The gradients of a tick are one tensor, which is added to the sums as a whole. Where devices
    compute other rows with the same weights, they add up their own gradients over all ticks, and
    each other's after the last one (wings/spmd_passes/loop_sums.py).
    """

    def zero_sums(self) -> tf.Tensor:
        """Returns the sums [R,P,...] before the first tick."""
        return self._zeros()

    def begin_tick(self, sums: tf.Tensor) -> tf.TensorArray:
        """Returns an empty array of gradients [P,...], one for each layer of a stage."""
        stages, layers, *shape = self.weight.shape
        return tf.TensorArray(self.weight.dtype, layers, element_shape=[stages, *shape])

    def add(self, total: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor) -> Sums:
        """Returns the gradients of the tick with d [P,...] among them."""
        del t
        d = annotate_like(d, self._spec_with("P"))
        return d if self.per_tick == 1 else total.write(r, d)

    def end_tick(self, sums: tf.Tensor, total: Any) -> tf.Tensor:
        """Returns the sums [R,P,...] with the gradients of a tick added."""
        by_layer = total[tf.newaxis] if self.per_tick == 1 else total.stack()
        return sums + tf.cast(annotate_like(by_layer, self._spec_with("RP")), tf.float32)
