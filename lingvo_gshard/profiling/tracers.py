"""Records traces by the library that runs the steps: jax's profiler or TensorFlow's.

Each library traces only what it executes itself. Both write XSpace files.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.planning.machines import chips
from lingvo_gshard.profiling.tracer import JaxTracer, Tracer, matrix, only_trace
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.training.run.runtime_protocol import Runtime


def tracer_of(runtime: Runtime) -> Tracer:
    """Returns the tracer of the library that a runtime runs its steps with."""
    return TensorFlowTracer() if isinstance(runtime, SingleDeviceRuntime) else JaxTracer()


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
            return only_trace(self._directory.name)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        return tf.profiler.experimental.Trace(name, step_num=step, _r=1)

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
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
        x = tf.constant(matrix(size))
        product = tf.function(lambda x: tf.matmul(x, x), jit_compile=True)
        # Reading one element waits for the product and copies little.
        return lambda: product(x)[0, 0].numpy()
