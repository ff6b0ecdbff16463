"""Checks that devices compute products in the 8 bits of `step.precision`."""

from __future__ import annotations

import re

from lingvo_gshard.core import UserError
from lingvo_gshard.layers import MixtureOfExperts
from lingvo_gshard.tasks import Task
from lingvo_gshard.training import Precision
from lingvo_gshard.wings.low_precision.rounding import BY_KERNELS, NVFP4, ROUNDINGS, SIMULATED

# The compute capabilities of Ada and Blackwell. Earlier NVIDIA GPUs have no FP8 and no MXFP8.
_FIRST_CAPABILITY = {"fp8": (8, 9), "mxfp8": (10, 0)}
# By precision: patterns of jax's names, in lower case, of TPUs with faster products, and of GPUs
# without. XLA calls no library for the products of int8 on GPUs.
_TPUS = {"fp8": re.compile(r"tpu7x"), "mxfp8": re.compile(r"(?!)"), "int8": re.compile(r"\bv[56]")}
_BEFORE_ADA = r"a100|a30|a10\b|a10g|v100|t4\b"
_OLD_GPUS = {
    "fp8": re.compile(_BEFORE_ADA),
    "mxfp8": re.compile(rf"{_BEFORE_ADA}|l4|h[128]00|h20\b|gh200|ada|rtx 40"),
    "int8": re.compile(""),
}


def check_name(precision: Precision, platform: str, name: str, capability: str = "") -> None:
    """Checks that devices compute the products of a precision in 8 bits, or simulate them.

    Args:
      platform: jax's name of their platform.
      name: jax's name of such devices.
      capability: the compute capability of a GPU, such as "9.0"; empty if it is not known.

    Raises:
      UserError: products would be no faster than in bfloat16; names step.precision.
    """
    if precision.name not in ROUNDINGS:
        return
    if precision.name in SIMULATED:
        if platform == "cuda" and not _has_products("fp8", platform, name, capability):
            raise UserError(
                f"step.precision is {precision.name!r}, but {name} has no FP8, in which kernels "
                "multiply blocks. Set step.precision = 'bfloat16'"
            )
        return
    faster = [each for each in _TPUS if _has_products(each, platform, name, capability)]
    if precision.name in faster:
        return
    raise UserError(
        f"step.precision is {precision.name!r}, but products are no faster in it than in bfloat16 "
        f"on {name}. Set step.precision = {(faster or ['bfloat16'])[0]!r}"
    )


def _has_products(precision: str, platform: str, name: str, capability: str) -> bool:
    """Returns whether products are faster in a precision of 8 bits than in bfloat16."""
    if platform == "tpu":
        return bool(_TPUS[precision].search(name.lower()))
    is_known = precision in _FIRST_CAPABILITY and re.fullmatch(r"\d+\.\d+", capability)
    if platform == "cuda" and is_known:
        return tuple(map(int, capability.split("."))) >= _FIRST_CAPABILITY[precision]
    return platform != "cuda" or not _OLD_GPUS[precision].search(name.lower())


def notes(precision: Precision, task: Task, platform: str, has_kernels: bool = True) -> list[str]:
    """Returns sentences on products that are not computed in the 8 bits of a precision."""
    if precision.name not in (*ROUNDINGS, NVFP4):
        return []
    others = ""
    if precision.name in SIMULATED:
        reason = "no compiler has products with a scale for each block"
        if platform == "cuda" and has_kernels and _has_dropless_experts(task):
            others = ", but for those of dropless experts"
    elif precision.name == NVFP4 and platform == "cuda" and has_kernels:
        return [
            "step.precision = 'nvfp4' multiplies in 4 bits on B200 and later GPUs. Earlier ones "
            "simulate it, which takes longer than 'bfloat16'"
        ]
    elif precision.name in (*BY_KERNELS, NVFP4) and platform == "cuda" and not has_kernels:
        reason = "TensorFlow compiles this step, without kernels; the runtime spmd has them"
    elif platform not in ("tpu", "cuda"):
        reason = f"no products in 8 bits are known on {platform}"
    elif precision.name == NVFP4:
        reason = "no TPU has products in 4 bits"
    else:
        return []
    return [
        f"step.precision = {precision.name!r} is simulated{others}: factors of products are "
        f"rounded to few bits and multiplied in a wider type, which takes longer than 'bfloat16'; "
        f"{reason}"
    ]


def _has_dropless_experts(task: Task) -> bool:
    mixtures = [layer for layer in task.all_layers() if isinstance(layer, MixtureOfExperts)]
    return any(layer.p.dispatch.cls.is_dropless for layer in mixtures)
