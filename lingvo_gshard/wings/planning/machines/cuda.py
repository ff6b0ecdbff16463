"""XLA's compiler for NVIDIA GPUs: the packages that hold it, and the hosts that it compiles for."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.planning.machines.chips import Chip
from lingvo_gshard.wings.planning.machines.gpu_targets import description

# The tested version of the packages, which the extra `plan-gpu` of this package installs.
VERSION = "0.10.2"

# The plugin and the compiler. Compiling needs neither a driver nor CUDA's libraries.
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
MISSING = "XLA's compiler for GPUs is not installed"

# The command that installs the compiler for the Python that runs, from any folder. The packages
# have no dependencies but jax, which is installed.
INSTALL = shlex.join(
    [sys.executable or "python3", "-m", "pip", "install", *(f"{p}=={VERSION}" for p in PACKAGES)]
)

# Autotuning would run kernels, which takes a GPU.
OPTIONS: Mapping[str, Any] = {"xla_gpu_autotune_level": 0}

# An option of the compiler, in percent, 95 by default. It limits temporaries to this share of the
# memory that remains of 80% of the GPU's memory. The compiler computes products again to stay below
# the limit.
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
ALL_MEMORY = 200

# For Hopper and later GPUs, the compiler estimates collectives by this speed of a GPU's network
# adapter in GB/s when it schedules, 25 for an H100. With 400, more than any adapter has, it begins
# collectives elsewhere: plans of three published trainings became 2% faster to 1% slower, and
# `language_model.glam_64b_64e` 5% faster.
NETWORK_SPEED = "xla_gpu_analytical_latency_estimator_options=nic_speed_gbps"
OTHER_SPEED = 400
# Steps that wait for communication for less than this share of their time have little to gain.
_WAITING = 0.1

# Part of the names of operations that the compiler computes again to save memory.
_AGAIN = ".remat"

# Otherwise the plugin asks the driver for the number of GPUs, and is not used if there is none.
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def installed() -> str | None:
    """Returns the installed version of the compiler; None if there is none."""
    try:
        return min(importlib.metadata.version(package) for package in PACKAGES)
    except importlib.metadata.PackageNotFoundError:
        return None


def recomputation_notes(seconds: Mapping[str, float]) -> list[str]:
    """Returns a note on what the compiler computes again. `seconds` has times by instruction."""
    again = [taken for name, taken in seconds.items() if _AGAIN in name]
    if not again:
        return []
    share = sum(again) / sum(seconds.values())
    return [
        f"the compiler computes {len(again)} operations again, {share:.0%} of the step, to stay "
        f"below 80% of the memory; XLA_FLAGS=--{MEMORY_LIMIT}={ALL_MEMORY}, for plans and "
        "trainings alike, lets it use more"
    ]


def schedule_notes(waiting: float, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a note on how to hide communication, from the share of time that waits for it."""
    if waiting < _WAITING or NETWORK_SPEED in environment.get("XLA_FLAGS", ""):
        return []
    return [
        f"the step waits for communication for {waiting:.0%} of its time; "
        f"XLA_FLAGS=--{NETWORK_SPEED}={OTHER_SPEED}, for plans and trainings alike, makes XLA "
        "schedule it in another way: plan again to see whether it hides more"
    ]


def check_version() -> None:
    """Raises UserError if the packages are not installed in the version of jax."""
    if installed() is None:
        raise UserError(f"`topology`: {MISSING}; install it with {INSTALL}")
    wanted = importlib.metadata.version("jax")
    for package in PACKAGES:
        version = importlib.metadata.version(package)
        if version != wanted:
            raise UserError(
                f"`topology`: {package} {version} is installed, but jax {wanted} requires "
                f"{package}=={wanted}; install it with {INSTALL.replace(VERSION, wanted)}"
            )


def devices(chip: Chip, hosts: int, gpus: int) -> list[Any]:
    """Returns the GPUs of several hosts, to compile programs for, host by host.

    Raises:
      UserError: if the compiler is missing or was not found when jax started; names `topology`.
    """
    check_version()
    assert chip.target is not None
    os.environ.setdefault(_SKIP_CHECK, "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            platform="cuda",
            # Partitions of a network, each partition's hosts, and each host's GPUs.
            topology=f"1x{hosts}x{gpus}",
            target_config=description(chip.target, chip.memory_bytes, chip.memory_bandwidth),
        ).devices
    except NotImplementedError:
        raise UserError(
            f"`topology=gpu:{chip.key}:{hosts}x{gpus}`: this process started jax without the "
            f"compiler for GPUs; plan in a new process, or set {_SKIP_CHECK}=1 before jax is used"
        ) from None
