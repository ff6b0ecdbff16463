"""CheckedRuntime: computes some steps twice from the same state and compares all bits.

A device whose memory or arithmetic is defective goes on computing, and nobody notices until the
model is bad. A step is a function of the state and the batch, so two computations of it are equal
to the bit. Where they differ, the device and the tensors that differ are known.

A training step donates the memory of the state. A step that is computed twice begins with a copy of
the state on the devices, so it takes the memory of a second state, and the time of a second step.
"""

from __future__ import annotations

import time
from typing import Any

from lingvo_gshard.core.lazy import jax, jnp
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.run.determinism import shard_digests
from lingvo_gshard.training.run.determinism.shard_digests import Digests
from lingvo_gshard.training.run.runtime_protocol import Metrics, Runtime
from lingvo_gshard.training.run.signals import TrainingFailedError

_MACHINE = (
    "Take the machine of this device out of use, and continue with the same command from the last "
    "checkpoint"
)
_PROGRAM = (
    "As most tensors differ, the program may not be deterministic: a layer may draw random numbers "
    "of its own, or a GPU may need XLA_FLAGS=--xla_gpu_deterministic_ops=true"
)


class WrongResultError(TrainingFailedError):
    """Two computations of a step, or two copies of a tensor, differ."""


class ReadMetrics:
    """The metrics of a step that were read before, in the form that the training loop expects."""

    def __init__(self, row: dict[str, float]):
        self._row = row

    def read(self) -> dict[str, float]:
        """Returns name -> value."""
        return dict(self._row)


class CheckedRuntime:
    """A runtime that computes every K-th step twice. Everything else it leaves to the runtime."""

    def __init__(self, runtime: Runtime, every: int):
        """Wraps a runtime.

        Args:
          runtime: what computes the steps.
          every: steps between those that are computed twice.
        """
        self._runtime = runtime
        self._every = every
        self._step: int | None = None
        self._messages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def init_state(self) -> None:
        """Draws the initial weights."""
        self._runtime.init_state()
        self._step = None

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state."""
        self._runtime.load_state(state)
        self._step = None

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        messages, self._messages = self._messages, []
        return [*self._runtime.pop_messages(), *messages]

    def train_step(self, batch: Batch) -> Metrics:
        """Takes one training step.

        Raises:
          WrongResultError: the step was computed twice with different results, or devices hold
            different copies of a tensor.
        """
        self._step = (self._runtime.step if self._step is None else self._step) + 1
        if self._step % self._every:
            return self._runtime.train_step(batch)
        return self._take_twice(batch)

    def _take_twice(self, batch: Batch) -> Metrics:
        started = time.monotonic()
        before = self._digests("before")
        saved = self._runtime.state().transform(_copy)
        first_row = self._runtime.train_step(batch).read()
        first = self._digests("after")
        self._runtime.load_state(saved)
        # The next step donates the memory of the copy, which nothing else may hold.
        del saved
        row = self._runtime.train_step(batch).read()
        second = self._digests("after")
        self._compare(first, second, first_row, row)
        if not self._messages and self._step == self._every:
            self._messages.append(self._words(before, time.monotonic() - started))
        return ReadMetrics(row)

    def _digests(self, when: str) -> Digests:
        """Returns the digests of the state. Raises WrongResultError if copies differ."""
        state = self._runtime.state()
        found = shard_digests.shard_digests(state)
        wrong = shard_digests.unequal_copies(state, found)
        if wrong:
            text = shard_digests.words(wrong, _device_count(found))
            what = f"devices hold different copies of a tensor {when} it: {text}"
            raise self._error(what, _MACHINE)
        return found

    def _compare(
        self,
        first: Digests,
        second: Digests,
        first_row: dict[str, float],
        second_row: dict[str, float],
    ) -> None:
        found = shard_digests.differences(first, second)
        metrics = [
            name for name, value in first_row.items() if not _is_same(value, second_row[name])
        ]
        if not found and not metrics:
            return
        text = shard_digests.words(found, _device_count(first)) or "none of its tensors"
        also = f"; of its metrics {', '.join(metrics[:3])}" if metrics else ""
        what = f"it was computed twice from the same state, and differs on {text}{also}"
        is_everywhere = len({one.path for one in found}) > len(first) / 2
        raise self._error(what, _PROGRAM if is_everywhere else _MACHINE)

    def _error(self, what: str, advice: str) -> WrongResultError:
        return WrongResultError(f"step {self._step:,}: {what}. {advice}")

    def _words(self, found: Digests, seconds: float) -> str:
        devices = _device_count(found)
        where = f"on {devices:,} devices" if devices > 1 else "on one device"
        return (
            f"step {self._step:,}: computed twice in {seconds:.1f} s, equal in every bit {where}; "
            f"again every {self._every:,} steps"
        )


def checked(runtime: Runtime, every: int) -> Runtime:
    """Returns a runtime that computes every `every`-th step twice; 0 returns it as it is."""
    wrapped: Any = CheckedRuntime(runtime, every)
    return wrapped if every else runtime


def _copy(value: Any) -> Any:
    """Returns a copy of a jax array on its devices, and a NumPy array as it is."""
    return jnp.copy(value) if isinstance(value, jax.Array) else value


def _device_count(found: Digests) -> int:
    return len({device for digests in found.values() for device in digests})


def _is_same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)
