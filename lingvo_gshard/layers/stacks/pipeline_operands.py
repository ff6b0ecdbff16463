"""Operands of a pipeline: the tensors that its stages read in a tick, and their gradients.

An operand is read for all stages at once, as a stack [P,...]. Every operand has these methods:

    read(t, r)              the values [P,...] that stages read in tick t, in run r of the body
    zero_sums()             initial sums of gradients
    add(sums, t, r, d)      the sums with the gradients d [P,...] of that read added
    gradient(sums)          the gradient of the operand, from the sums over all reads
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.stacks.pipeline_schedule import Schedule
from lingvo_gshard.sharding import annotate_like

LOCAL_LETTERS = {"m": "micro-batches"}


@dataclasses.dataclass(frozen=True)
class MicroBatchOperand:
    """A tensor of all micro-batches. A stage reads the part of its current micro-batch.

    In tick t all stages add their gradients at index t modulo the number of micro-batches,
    regardless of their micro-batch. An index that differs between stages would need communication.
    `gradient` puts the sums in order.

    Attributes:
      tensor: [m,B,...].
      schedule: the schedule of the pipeline.
    """

    tensor: tf.Tensor
    schedule: Schedule

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        """Returns the rows of each stage's micro-batch, [P,B,...]."""
        del r
        return tf.gather(self.tensor, self.schedule.micro_batch(t))

    def zero_sums(self) -> tf.TensorArray:
        """Returns an array of float32 sums [P,B,...], one for each micro-batch."""
        count, *shape = self.tensor.shape
        zeros = tf.zeros([count, self.schedule.stages, *shape])
        array = tf.TensorArray(tf.float32, count, element_shape=zeros.shape[1:])
        return array.unstack(zeros)

    def add(self, sums: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor) -> tf.TensorArray:
        """Returns the sums with the gradients d [P,B,...] of one read added."""
        del r
        index = tf.math.floormod(t, self.schedule.micro_batches)
        return sums.write(index, sums.read(index) + tf.cast(d, tf.float32))

    def gradient(self, sums: tf.TensorArray) -> tf.Tensor:
        """Returns the gradient [m,B,...] of the tensor."""
        micro_batches, stages = np.ogrid[: self.schedule.micro_batches, : self.schedule.stages]
        indices = (micro_batches + stages) % self.schedule.micro_batches
        order = [1, 0, *range(2, self.tensor.shape.rank + 1)]
        by_stage = tf.gather(tf.transpose(sums.stack(), order), indices.T, batch_dims=1)
        return tf.cast(tf.reduce_sum(by_stage, 0), self.tensor.dtype)


@dataclasses.dataclass(frozen=True)
class WeightOperand:
    """A stack of weights. A stage reads the weight of the layer that it runs next.

    The circulations of two stages differ by at most one. In every tick, all stages therefore read
    and write the same two indices along R, and each stage selects one. An index that differs
    between stages would make XLA communicate weights.

    Attributes:
      weight: [P,R,...], where R counts the layers of a stage.
      spec: spec of the weight of one layer.
      schedule: the schedule of the pipeline.
      per_tick: number of times that a stage runs its body in a tick.
    """

    weight: tf.Tensor
    spec: VariableSpec
    schedule: Schedule
    per_tick: int

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        """Returns the weight that each stage uses, [P,...]."""
        (index, _), *alternatives = self._candidates(t, r)
        selected = self._at(index)
        for index, is_selected in alternatives:
            selected = tf.where(is_selected, self._at(index), selected)
        return annotate_like(selected, self._spec_with("P"))

    def zero_sums(self) -> tf.TensorArray:
        """Returns an array of float32 sums [P,...], one for each layer of a stage."""
        stages, layers, *shape = self.weight.shape
        zeros = annotate_like(tf.zeros([layers, stages, *shape]), self._spec_with("RP"))
        array = tf.TensorArray(tf.float32, layers, element_shape=zeros.shape[1:])
        return array.unstack(zeros)

    def add(self, sums: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor) -> tf.TensorArray:
        """Returns the sums with the gradients d [P,...] of one read added."""
        d = tf.cast(annotate_like(d, self._spec_with("P")), tf.float32)
        for index, is_selected in self._candidates(t, r):
            sums = sums.write(index, sums.read(index) + tf.where(is_selected, d, 0.0))
        return sums

    def gradient(self, sums: tf.TensorArray) -> tf.Tensor:
        """Returns the gradient [P,R,...] of the weight."""
        by_layer = annotate_like(sums.stack(), self._spec_with("RP"))
        order = [1, 0, *range(2, by_layer.shape.rank)]
        gradient = tf.cast(tf.transpose(by_layer, order), self.weight.dtype)
        return annotate_like(gradient, self._spec_with("PR"))

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
