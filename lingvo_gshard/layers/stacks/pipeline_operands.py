"""What the stages of a pipeline read in a tick, and the sums of its gradients.

An operand is read for all stages at once, as a stack [P,...]. Both kinds have these methods:

    read(t, r)                what each stage reads in tick t, the r-th time it runs
    zeros()                   where a sum of gradients begins
    add(total, t, r, d)       the sum with the gradients d [P,...] of what was read then
    gradient(total)           the operand's gradient, when all have been added
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.layers.stacks.pipeline_schedule import Schedule
from lingvo_gshard.sharding import annotate_like


@dataclasses.dataclass(frozen=True)
class OfMicroBatch:
    """A tensor [R,B,...] of R micro-batches, of which a stage reads its micro-batch's part.

    Gradients are added up at place t modulo R, whichever micro-batches the stages have then: so all
    write to the same place, and none to a place that depends on its number.
    """

    tensor: tf.Tensor
    schedule: Schedule

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        """Returns [P,B,...]."""
        del r
        return tf.gather(self.tensor, self.schedule.micro_batch(t))

    def zeros(self) -> tf.TensorArray:
        """Returns, for every place, [P,B,...]."""
        count, *shape = self.tensor.shape
        places = tf.zeros([count, self.schedule.stages, *shape])
        array = tf.TensorArray(tf.float32, count, element_shape=places.shape[1:])
        return array.unstack(places)

    def add(
        self, total: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor
    ) -> tf.TensorArray:
        """Returns the sum with d [P,B,...]."""
        del r
        place = tf.math.floormod(t, self.schedule.micro_batches)
        return total.write(place, total.read(place) + tf.cast(d, tf.float32))

    def gradient(self, total: tf.TensorArray) -> tf.Tensor:
        """Returns [R,B,...]."""
        micro_batches, stages = np.ogrid[: self.schedule.micro_batches, : self.schedule.stages]
        places = (micro_batches + stages) % self.schedule.micro_batches
        order = [1, 0, *range(2, self.tensor.shape.rank + 1)]
        by_stage = tf.gather(tf.transpose(total.stack(), order), places.T, batch_dims=1)
        return tf.cast(tf.reduce_sum(by_stage, 0), self.tensor.dtype)


@dataclasses.dataclass(frozen=True)
class OfLayer:
    """A weight [P,R,...], of whose R layers in a stage each stage reads that it is about to run.

    Which one that is differs from stage to stage by one circulation at most. So two are read and
    written for all stages alike: a place that depends on its number would have XLA move weights.
    """

    weight: tf.Tensor
    spec: VariableSpec
    schedule: Schedule
    per_tick: int

    def read(self, t: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
        """Returns [P,...]."""
        (place, _), *older = self._places(t, r)
        chosen = self._at(place)
        for place, is_there in older:
            chosen = tf.where(is_there, self._at(place), chosen)
        return annotate_like(chosen, self._stacked("P"))

    def zeros(self) -> tf.TensorArray:
        """Returns, for every layer of a stage, [P,...]."""
        stages, layers, *shape = self.weight.shape
        zeros = annotate_like(tf.zeros([layers, stages, *shape]), self._stacked("RP"))
        array = tf.TensorArray(tf.float32, layers, element_shape=zeros.shape[1:])
        return array.unstack(zeros)

    def add(
        self, total: tf.TensorArray, t: tf.Tensor, r: tf.Tensor, d: tf.Tensor
    ) -> tf.TensorArray:
        """Returns the sum with d [P,...]."""
        d = tf.cast(annotate_like(d, self._stacked("P")), tf.float32)
        for place, is_there in self._places(t, r):
            total = total.write(place, total.read(place) + tf.where(is_there, d, 0.0))
        return total

    def gradient(self, total: tf.TensorArray) -> tf.Tensor:
        """Returns [P,R,...]."""
        by_layer = annotate_like(total.stack(), self._stacked("RP"))
        order = [1, 0, *range(2, by_layer.shape.rank)]
        gradient = tf.cast(tf.transpose(by_layer, order), self.weight.dtype)
        return annotate_like(gradient, self._stacked("PR"))

    def _places(self, t: tf.Tensor, r: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Along R the layers that stages run now, and which stages [P,1,...] run each."""
        newest = self.schedule.newest_circulation(t)
        ones = [1] * (self.weight.shape.rank - 2)
        is_newest = tf.reshape(tf.equal(self.schedule.circulation(t), newest), [-1, *ones])
        places = [(newest * self.per_tick + r, is_newest)]
        if self.schedule.circulations > 1:
            older = tf.maximum(newest - 1, 0)
            places.append((older * self.per_tick + r, ~is_newest))
        return places

    def _at(self, place: tf.Tensor) -> tf.Tensor:
        stages, _, *shape = self.weight.shape
        start = [0, place] + [0] * len(shape)
        return tf.squeeze(tf.slice(self.weight, start, [stages, 1, *shape]), 1)

    def _stacked(self, letters: str) -> VariableSpec:
        unsplit = self.spec.unsplit + letters.replace("P", "")
        return dataclasses.replace(self.spec, layout=letters + self.spec.layout, unsplit=unsplit)
