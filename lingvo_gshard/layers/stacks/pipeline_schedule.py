"""Schedule of a pipeline: the micro-batch that each stage computes in each tick."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_gshard.core.lazy import tf


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule in which all P stages compute in every tick, each one tick after the previous stage.

    With one circulation this is the forward half of GPipe (Huang et al. 2018, arXiv 1811.06965,
    section 2.3): stage s computes micro-batch i in tick i + s. With several circulations a stage
    has several chunks of layers, and a micro-batch that leaves the last stage returns to the first
    one (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Attributes:
      stages: number P of stages.
      micro_batches: number of micro-batches.
      circulations: number of times that each micro-batch passes all stages.
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
        """Fraction of the ticks in which a stage has no micro-batch (the bubble)."""
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
        """Returns the tick in which each stage computes each micro-batch.

        The result is int [circulations, P, micro_batches].
        """
        entry = np.arange(self.circulations * self.micro_batches)
        entry = entry.reshape(self.circulations, 1, self.micro_batches)
        return entry + np.arange(self.stages)[None, :, None]
