"""JaxTracer: records what jax executes, without TensorFlow."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.planning.machines import chips
from lingvo_gshard.profiling.traces.tracer import matrix, only_trace

# Operations of programs are recorded at this level, each call of Python is not.
_HOST_LEVEL = 2


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
            return only_trace(self._directory.name)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        return jax.profiler.StepTraceAnnotation(name, step_num=step)

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
        device = jax.devices()[0]
        if device.platform == "cpu":
            return "cpu"
        chip = chips.of_device(device.platform, device.device_kind)
        return chip.key if chip else ""

    def product(self, size: int) -> Callable[[], object]:
        """Returns a call that computes a float32 product of square matrices on one device."""
        x = jax.device_put(matrix(size), jax.local_devices()[0])
        product = jax.jit(lambda x: x @ x)
        return lambda: jax.block_until_ready(product(x))
