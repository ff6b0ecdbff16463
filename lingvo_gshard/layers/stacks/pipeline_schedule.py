"""When each stage of a pipeline computes which micro-batch, and how long stages are idle."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of P stages that all compute in every tick, each a tick behind the one before it.

    With one circulation it is GPipe's forward half (Huang et al. 2018, arXiv 1811.06965, section
    2.3): micro-batch i is at stage s in tick i + s. With more, a stage has several chunks of layers
    that are not neighbors, and a micro-batch that has left the last stage enters the first again
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """

    stages: int
    micro_batches: int
    circulations: int = 1

    @property
    def ticks(self) -> int:
        """In how many ticks all micro-batches have passed all stages."""
        return self.micro_batches * self.circulations + self.stages - 1

    @property
    def idle_share(self) -> float:
        """The share of a stage's ticks in which it computes nothing of use."""
        return (self.stages - 1) / self.ticks

    def micro_batch(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns int32 [P]: which micro-batch each stage has; any where it is idle."""
        return tf.math.floormod(self._entered(tick), self.micro_batches)

    def circulation(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns int32 [P]: the how-manieth time that is; any where it is idle."""
        return self._circulation(self._entered(tick))

    def newest_circulation(self, tick: tf.Tensor) -> tf.Tensor:
        """Returns that of the first stage; other stages have it, or the one before."""
        return self._circulation(tick)

    def _circulation(self, entered: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(entered // self.micro_batches, 0, self.circulations - 1)

    def _entered(self, tick: tf.Tensor) -> tf.Tensor:
        """How many ticks after the first micro-batch that of each stage entered the pipeline."""
        return tick - tf.range(self.stages)

    def used(self) -> np.ndarray:
        """Returns ticks [circulations, P, micro_batches]: when each stage computes what."""
        entered = np.arange(self.circulations * self.micro_batches)
        entered = entered.reshape(self.circulations, 1, self.micro_batches)
        return entered + np.arange(self.stages)[None, :, None]
