"""Which devices compute products in 8 bits, for `step.precision`."""

from __future__ import annotations

import re

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.layers.rounding import SIMULATED
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.training.step.precision import Precision

# The compute capability of the first NVIDIA GPUs with FP8, Ada.
_FIRST_CAPABILITY = (8, 9)
# Parts of jax's names, in lower case, of TPUs and GPUs without FP8.
_WITHOUT = re.compile(r"\bv[2-6]|a100|a30|a10\b|a10g|v100|t4\b")


def check_device(precision: Precision, device: Device) -> None:
    """Checks that a device computes the products of a precision in 8 bits, or simulates them.

    Args:
      precision: the precision.
      device: a device, which need not be in this machine.

    Raises:
      UserError: the device would compute the products in bfloat16; names step.precision.
    """
    if platform_of(device) in ("tpu", "cuda"):
        capability = getattr(device, "compute_capability", "")
        check_name(precision, device.device_kind, capability)


def check_name(precision: Precision, name: str, capability: str = "") -> None:
    """Checks what `check_device` does, for a TPU or a GPU of a name.

    Args:
      precision: the precision.
      name: jax's name of such devices.
      capability: the compute capability of a GPU, such as "9.0"; empty if it is not known.
    """
    if not precision.rounding or precision.rounding in SIMULATED:
        return
    is_known = bool(re.fullmatch(r"\d+\.\d+", capability))
    is_old = is_known and tuple(map(int, capability.split("."))) < _FIRST_CAPABILITY
    if is_old or (not is_known and _WITHOUT.search(name.lower())):
        raise UserError(
            f"step.precision is {precision.name!r}, but {name} has no products in FP8: they would "
            "be slower than in bfloat16. Set step.precision = 'bfloat16', or use H100, B200, L40S "
            "or TPU7x"
        )


def notes(precision: Precision, platform: str) -> list[str]:
    """Returns a sentence if products are rounded to 8 bits but computed in a wider type.

    Args:
      precision: the precision.
      platform: jax's name of the devices' platform.
    """
    if not precision.rounding:
        return []
    if precision.rounding in SIMULATED:
        where = "no compiler has products with a scale for each block"
    elif platform == "cpu":
        where = "CPUs have no products in FP8"
    else:
        return []
    return [
        f"step.precision = {precision.name!r} is simulated: factors of products are rounded to 8 "
        f"bits and multiplied in a wider type, which takes longer than 'bfloat16'; {where}"
    ]
