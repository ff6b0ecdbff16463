"""Checks memory, disk, limits and devices of the machine."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from lingvo_gshard.core import user_cache
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device, jax
from lingvo_gshard.tools.console import libraries
from lingvo_gshard.tools.diagnosis.check import Check, State

_GIB = 2**30
# The quickstart needs 1.6 GiB of memory. Its checkpoints and caches need less disk than this.
_LEAST_MEMORY, _LEAST_DISK = 2 * _GIB, 2 * _GIB
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")
# Files that exist where a driver has found an accelerator -> what jax needs to use it.
_DRIVERS = {
    "/dev/nvidia0": ("an NVIDIA GPU", "pip install 'jax[cuda12]=={version}'"),
    "/dev/accel0": ("a TPU", "pip install 'jax[tpu]=={version}'"),
}


def check_host(directory: str = "") -> Iterator[Check]:
    """Yields the checks of cores, memory, limits and disk.

    Args:
      directory: where runs will be written; the current directory by default.
    """
    yield Check("cores", State.OK, f"{len(os.sched_getaffinity(0))} cores")
    free = available_memory()
    is_enough = free >= _LEAST_MEMORY
    yield Check(
        "memory",
        State.OK if is_enough else State.FAILURE,
        f"{free / _GIB:.1f} GiB are free",
        "" if is_enough else "end other programs: the quickstart needs 2 GiB",
    )
    try:
        libraries.check_limits()
    except UserError as error:
        yield Check("limits", State.FAILURE, str(error), "see ulimit -a")
    for name, place in (("runs", directory or "."), ("cache", user_cache.directory("programs"))):
        yield _check_disk(name, place)


def available_memory() -> int:
    """Returns the bytes of memory that new programs may use, a container's limit included."""
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return min(available, int(limit)) if limit.isdigit() else available


def _check_disk(name: str, place: str) -> Check:
    path = pathlib.Path(place).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        advice = "choose another directory, or set XDG_CACHE_HOME" if name == "cache" else "cd"
        return Check(f"disk: {name}", State.FAILURE, f"{existing} cannot be written", advice)
    free = shutil.disk_usage(existing).free
    is_enough = free >= _LEAST_DISK
    return Check(
        f"disk: {name}",
        State.OK if is_enough else State.WARNING,
        f"{free / _GIB:.1f} GiB are free for {path}",
        "" if is_enough else "checkpoints of large models need more; remove old runs",
    )


def check_devices(devices: Sequence[Device]) -> Iterator[Check]:
    """Yields the checks of the devices that jax has found."""
    for kind, count in collections.Counter(d.device_kind for d in devices).items():
        first = next(d for d in devices if d.device_kind == kind)
        limit = (first.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / _GIB:.1f} GiB each for programs" if limit else ""
        virtual = " (virtual, on the cores above)" if first.platform == "cpu" and count > 1 else ""
        yield Check("devices", State.OK, f"{count} x {kind}{virtual}{memory}")
    if all(device.platform == "cpu" for device in devices):
        for file, (what, install) in _DRIVERS.items():
            if pathlib.Path(file).exists():
                found = f"this machine has {what} ({file}), but jax sees only the CPU"
                advice = install.format(version=jax.__version__)
                yield Check("devices", State.WARNING, found, advice)
