"""Finds the devices of a mesh, and creates virtual CPU devices if there are too few."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from lingvo_gshard.core import Device, UserError, jax, tf
from lingvo_gshard.runtime import standard_error

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NONE, _NEVER = 0, -1


def keep_pages() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the kernel.

    By default glibc gets each large buffer from the kernel and returns it. For the temporaries and
    results of a compiled step this costs 0.3 s per GiB, while writing a GiB takes 0.04 s. The
    process keeps its peak size in exchange. Call this before the first large allocation.

    Returns:
      Whether the allocator was configured. False without glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, _NONE) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


# More virtual devices than this take minutes to start, and gigabytes.
_MOST_VIRTUAL = 1024


def keep_jax_on_cpu() -> None:
    """Keeps jax off the accelerators, which TensorFlow uses, unless JAX_PLATFORMS names others.

    The local runtime computes with TensorFlow, and Orbax brings jax along. The two libraries cannot
    share a GPU's memory.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def let_jax_choose_devices() -> None:
    """Undoes `keep_jax_on_cpu`: jax uses all devices, or the devices of JAX_PLATFORMS."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", None)


def platform_of(device: Device) -> str:
    """Returns jax's name of a device's platform: "cpu", "cuda", "rocm" or "tpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def devices_for(count: int | None, processes: int = 1, asked_by: str = "`mesh`") -> list[Device]:
    """Returns the devices for a mesh.

    A process without enough accelerators creates virtual CPU devices, which share its cores.

    Args:
      count: number of devices of all processes together; None for all that exist.
      asked_by: the option that needs so many devices, which errors name.

    Raises:
      UserError: names the option if jax has started with fewer devices, or if the processes of a
        cluster have another number of devices.
    """
    if count is not None and count % processes:
        raise UserError(
            f"{asked_by} needs {count} devices, which {processes} processes cannot share evenly; "
            f"expected a multiple of {processes}"
        )
    _leave_accelerators_to_jax()
    if count is not None:
        _make_virtual(max(count // processes, 1), count, asked_by)
    with standard_error.hide():
        # libtpu and CUDA complain at length where there is no TPU or GPU.
        devices = jax.devices()
    if count is None:
        return devices
    if len(devices) < count and processes == 1:
        devices = jax.devices("cpu")
    if len(devices) < count or (processes > 1 and len(devices) != count):
        where = f" in {processes} processes" if processes > 1 else ""
        raise UserError(
            f"{asked_by} needs {count} devices, but there are {len(devices)} "
            f"({devices[0].device_kind}){where}{_remedy(count, devices, processes)}"
        )
    return devices[:count]


def _remedy(count: int, devices: Sequence[Device], processes: int) -> str:
    """Returns how a process gets more virtual CPU devices; "" for other devices."""
    if processes > 1 or devices[0].platform != "cpu":
        return ""
    return (
        ". The number of virtual CPU devices cannot change after their first use: use the largest "
        f"mesh first, restart the notebook or program, or set JAX_NUM_CPU_DEVICES={count}"
    )


def peak_memory(devices: Sequence[Device]) -> int | None:
    """Returns the most bytes that were ever in use on one of this process's devices.

    None means that no device tells, as CPUs do not.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    found = [device.memory_stats() or {} for device in local]
    return max(
        (row["peak_bytes_in_use"] for row in found if "peak_bytes_in_use" in row), default=None
    )


def _leave_accelerators_to_jax() -> None:
    """Hides accelerators from TensorFlow, which would take all memory of a GPU it sees."""
    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:
            return


def _make_virtual(count: int, total: int, asked_by: str) -> None:
    """Sets the number of this process's CPU devices, of `total`, unless jax has started."""
    if count > _MOST_VIRTUAL:
        raise UserError(
            f"{asked_by} needs {total:,} devices; a process has at most {_MOST_VIRTUAL:,} virtual "
            "ones. gshard-plan knows what a step takes on machines that are not here"
        )
    try:
        if jax.config.values["jax_num_cpu_devices"] < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return
