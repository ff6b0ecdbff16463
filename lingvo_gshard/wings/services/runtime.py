"""DeviceRuntime: a runtime that also tells about its devices and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.core import NestedMap, WeightsHolder, tf
from lingvo_gshard.runtime import Compilation
from lingvo_gshard.training import Runtime


class DeviceRuntime(Runtime, WeightsHolder, Protocol):
    """A runtime that tells about its devices and programs, and may hold weights alone.

    With `load_theta` it has no state, which is enough for `eval_step` and `bind_weights`.
    """

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 CPU devices as data=8`."""
        ...

    @property
    def step(self) -> int:
        """Number of steps taken."""
        ...

    @property
    def compilations(self) -> Sequence[Compilation]:
        """The programs compiled so far; later ones are not always at the end."""
        ...

    def peak_device_memory(self) -> int | None:
        """Returns the most bytes ever in use on a device of this process; None if it is unknown."""
        ...

    def load_theta(self, theta: NestedMap) -> None:
        """Replaces the weights of `Trainer.evaluated_part`; there is no other state afterwards."""
        ...

    def own_rows(self, specs: Mapping[str, tf.TensorSpec]) -> np.ndarray:
        """Returns which rows of a batch of these specs this process's devices need, bool [B]."""
        ...
