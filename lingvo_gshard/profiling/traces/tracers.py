"""Records traces by the library that runs the steps: jax's profiler or TensorFlow's.

Each library traces only what it executes itself. Both write XSpace files.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Protocol

import numpy as np

from lingvo_gshard.core.lazy import jax, tf
from lingvo_gshard.planning.machines import chips
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.training.runtime_protocol import Runtime

# Operations of programs are recorded at this level, each call of Python is not.
_HOST_LEVEL = 2


class Tracer(Protocol):
    """Records a trace at a time."""

    def start(self) -> None:
        """Starts to record."""
        ...

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        ...

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        ...

    def chip_key(self) -> str:
        """Returns the devices' key in planning/machines, "cpu", or "" for unknown chips."""
        ...

    def product(self, size: int) -> Callable[[], object] | None:
        """Returns a call that computes a float32 product of square matrices on one device.

        Args:
          size: their rows and columns.

        Returns:
          None if the library cannot compute on a single device.
        """
        ...


def tracer_of(runtime: Runtime) -> Tracer:
    """Returns the tracer of the library that a runtime runs its steps with."""
    return TensorFlowTracer() if isinstance(runtime, SingleDeviceRuntime) else JaxTracer()


class JaxTracer:
    """Records what jax executes."""

    def start(self) -> None:
        """Starts to record."""
        self._directory = tempfile.TemporaryDirectory(prefix="profile")
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = _HOST_LEVEL
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._directory.name, profiler_options=options)

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        with self._directory:
            jax.profiler.stop_trace()
            return _only_trace(self._directory.name)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        return jax.profiler.StepTraceAnnotation(name, step_num=step)

    def chip_key(self) -> str:
        """Returns the devices' key in planning/machines, "cpu", or "" for unknown chips."""
        device = jax.devices()[0]
        if device.platform == "cpu":
            return "cpu"
        chip = chips.of_device(device.platform, device.device_kind)
        return chip.key if chip else ""

    def product(self, size: int) -> Callable[[], object]:
        """Returns a call that computes a float32 product of square matrices on one device."""
        x = jax.device_put(_matrix(size), jax.local_devices()[0])
        product = jax.jit(lambda x: x @ x)
        return lambda: jax.block_until_ready(product(x))


class TensorFlowTracer:
    """Records what TensorFlow executes."""

    def start(self) -> None:
        """Starts to record."""
        self._directory = tempfile.TemporaryDirectory(prefix="profile")
        # Options other than the defaults, which are those of jax here, cause warnings.
        tf.profiler.experimental.start(self._directory.name)

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        with self._directory:
            tf.profiler.experimental.stop()
            return _only_trace(self._directory.name)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        return tf.profiler.experimental.Trace(name, step_num=step, _r=1)

    def chip_key(self) -> str:
        """Returns the devices' key in planning/machines, "cpu", or "" for unknown chips."""
        if tf.config.list_logical_devices("TPU"):
            return ""
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            return "cpu"
        details = tf.config.experimental.get_device_details(gpus[0])
        chip = chips.of_device("gpu", details.get("device_name", ""))
        return chip.key if chip else ""

    def product(self, size: int) -> Callable[[], object] | None:
        """Returns a call that computes a float32 product of square matrices; None on a TPU."""
        if tf.config.list_logical_devices("TPU"):
            return None
        x = tf.constant(_matrix(size))
        product = tf.function(lambda x: tf.matmul(x, x), jit_compile=True)
        # Reading one element waits for the product and copies little.
        return lambda: product(x)[0, 0].numpy()


def _matrix(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((size, size), np.float32)


def _only_trace(directory: str) -> bytes:
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    return path.read_bytes()
