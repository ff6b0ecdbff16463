"""Platforms whose devices compute functions of layers with kernels of their own."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.core.seams import Seam
from lingvo_gshard.sharding.partitioning import Partitioning, current_sharding

# The platforms whose devices have kernels, by jax's names.
HARDWARE = ("cuda", "tpu")
# "tpu_interpreted" computes the bodies for TPUs on CPUs, step by step, which tests compare with
# other attentions.
_INTERPRETED = "_interpreted"
PLATFORMS = (*HARDWARE, *(platform + _INTERPRETED for platform in HARDWARE))
# A feature replaces its marks in a StableHLO module by code for a platform, one of PLATFORMS.
KERNEL_BODIES: Seam[Callable[[ir.Module, str], object]] = Seam("kernel_bodies")


def platform_in_use() -> str:
    """Returns the platform of the devices that a traced function is for; "" if it has no kernels.

    Programs that TensorFlow compiles itself, and those for several platforms, use no kernels.
    """
    partitioning = _partitioning()
    platform = partitioning.platform if partitioning is not None else ""
    return platform if platform in PLATFORMS else ""


def device_kind_in_use() -> str:
    """Returns jax's name of the devices that a traced function is for; "" if it is unknown."""
    partitioning = _partitioning()
    return partitioning.device_kind if partitioning is not None else ""


def _partitioning() -> Partitioning | None:
    now = current_sharding()
    return now.manual_partitioning or now.partitioning


def interpreted(platform: str) -> str:
    """Returns the platform that computes the kernels of a platform step by step; "" of ""."""
    return platform and platform + _INTERPRETED


def is_interpreted(platform: str) -> bool:
    """Returns whether a platform computes the kernels of another step by step, on CPUs."""
    return platform.endswith(_INTERPRETED)


def hardware_of(platform: str) -> str:
    """Returns the hardware that the kernels of a platform are made for: "tpu" or "cuda"."""
    return platform.removesuffix(_INTERPRETED)
