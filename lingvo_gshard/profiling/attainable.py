"""The rate that matrix products can reach: published for the chip, or measured here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

from lingvo_gshard.planning.machines import chips
from lingvo_gshard.profiling.profile import Rate
from lingvo_gshard.profiling.traces.tracer import Tracer

_SIZE = 2048
_REPEATS = 5
_CPU = "cpu"


def attainable(tracer: Tracer, devices: int) -> Rate | None:
    """Returns the rate that large products reach on the devices of this process together.

    It is the published rate in bfloat16 if the chip is known. Otherwise a large float32 product is
    timed on one device. CPU devices share the machine's cores: one product uses them all.

    Args:
      tracer: the tracer of the library that runs the steps, which computes the product.
      devices: number of devices of this process.

    Returns:
      None if the chip is unknown and no product can be timed.
    """
    key = tracer.chip_key()
    if key and key != _CPU:
        chip = chips.get(key)
        source = f"{devices} x the published bfloat16 rate of {chip.name}"
        return Rate(flops_per_second=chip.peak("bfloat16") * devices, source=source)
    multiply = tracer.product(_SIZE)
    if multiply is None:
        return None
    multiply()
    seconds = min(_seconds_of(multiply) for _ in range(_REPEATS))
    count = 1 if key == _CPU else devices
    source = f"the best of {_REPEATS} float32 products of {_SIZE} x {_SIZE} matrices, timed here"
    return Rate(flops_per_second=count * 2 * _SIZE**3 / seconds, source=source)


def _seconds_of(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
