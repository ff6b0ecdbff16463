"""The options of XLA's compilers that help steps: one table, with reasons.

Trainings and plans compile steps with the options of the table that are on, and `gshard-inspect
--compiler` lists them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from lingvo_gshard.core.lazy import Device
from lingvo_gshard.runtime import Program, platform_of
from lingvo_gshard.runtime.compile_options import DEFAULTS, RAGGED_EXCHANGE, Traits

# Groups of options that are on in some programs and off in others.
COLLECTIVE_PRODUCTS, ALL_TO_ALLS = "collective matrix products", "asynchronous all-to-alls"
WHOLE_PRODUCTS, PIPELINED = "whole products", "pipelined collectives"
PARALLEL = "parallel collectives"
# The most collectives of a GPU that are in flight at the same time.
_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"

_PLAIN = Traits()


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option of a compiler, and what it is for.

    Attributes:
      platform: jax's name of the platform, "tpu" or "cuda".
      name: XLA's name of the option.
      value: the value that serves the purpose.
      reason: what the option does, and why it is on or off.
      source: where the option is documented or used.
      devices: pattern of jax's names of devices, in lower case, that are compiled for with it
        unless `compile_options` says otherwise. "" is every device, and None is none.
      variant: name of a group of options that a search tries together where they are off.
      precision: the value of `step.precision` that the option is for; "" is every value.
      suits_parts: whether the option is also for steps in parts; see `Traits`.
      needs_gathers_ahead: whether the option is only for steps that gather weights ahead.
      if_ragged: the value for steps with ragged exchanges, see `Traits`; "" if they are as others.
    """

    platform: str
    name: str
    value: str
    reason: str
    source: str
    devices: str | None = ""
    variant: str = ""
    precision: str = ""
    suits_parts: bool = True
    needs_gathers_ahead: bool = False
    if_ragged: str = ""

    def is_on(self, platform: str, device_kind: str, traits: Traits = _PLAIN) -> bool:
        """Returns whether steps for a device are compiled with the option by default.

        Args:
          platform: jax's name of the device's platform.
          device_kind: jax's name of the device, such as "TPU v5 lite".
          traits: the step's; by default it has none.
        """
        if self.platform != platform or self.devices is None:
            return False
        if traits.in_parts and not self.suits_parts:
            return False
        if self.needs_gathers_ahead and not traits.gathers_ahead:
            return False
        if self.precision not in ("", traits.precision):
            return False
        return bool(re.search(self.devices, device_kind.lower()))

    def value_for(self, platform: str, device_kind: str, traits: Traits = _PLAIN) -> str:
        """Returns the value that steps for a device have by default; "" is XLA's. See `is_on`."""
        if self.platform == platform and traits.is_ragged and self.if_ragged:
            return self.if_ragged
        return self.value if self.is_on(platform, device_kind, traits) else ""


_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py"
_VLLM = (
    "https://github.com/vllm-project/tpu-inference/blob/main/tpu_inference/models/vllm/"
    "vllm_model_wrapper.py"
)
_NVIDIA = "https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance"
_RECIPES = (
    "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/v5p/SDXL-MaxDiffusion/"
    "cluster_toolkit/run_recipe.sh"
)
_NATIVE_FP8 = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/rosetta/docs/NATIVE_FP8.md"
_MLPERF = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/ac9bf614e59e452077ec782c02a45519f004a78b/"
    "MaxText/inference_mlperf/trillium/select_xla_flags.py"
)
_OLMOE = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/dd9c95112759f4e268128f997975f9afcbab3279/src/"
    "maxtext/trainers/pre_train/scripts/olmo/run_olmoe3_3p5b_v4_128.sh"
)
_STREAMS = "https://github.com/openxla/xla/blob/main/xla/service/gpu/thunk_emitter.cc"
_MOE = "docs/moe.md"
_RAGGED = "https://github.com/marin-community/marin/pull/8081"

# Parts of the names of libtpu's options for products with collectives, and what they mean.
_TPU_COLLECTIVES = (("all_gather", "an all-gather"), ("reduce_scatter", "a reduce-scatter"))
# Parts of the names of XLA's options for GPUs, and what they mean.
# Why all-gathers of steps in parts are not pipelined; see `Traits`.
_NOT_IN_PARTS = (
    ", and for micro-batches whose weights are not split by fsdp: XLA then computes a forward pass "
    "twice, and a plan with sequence parallelism takes 36% longer"
)
# Why nothing overlaps a ragged exchange on GPUs.
_WRONG_BESIDE = (
    "where the first backward pass of large banks of experts had gradients that are not numbers "
    f"({_RAGGED})"
)
_GPU_COLLECTIVES = (
    ("all_gather", "all-gathers"),
    ("reduce_scatter", "reduce-scatters"),
    ("all_reduce", "all-reduces"),
)

# Parts of jax's names of devices. The collectives of TPU7x are asynchronous by default.
_CORES = r"v[2-6]"
_V5E = r"v5 lite"
_HOPPER_AND_LATER = r"h[12]00|h20\b|b[23]00"

OPTIONS = (
    *(
        CompilerOption("tpu", name, "True", reason, source, devices=_CORES)
        for name, reason, source in (
            (
                "xla_enable_async_all_gather",
                "all-gathers are asynchronous, such as those of fsdp's weights",
                _MAXTEXT,
            ),
            (
                "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
                "fusions carry all-gathers under matrix products; else they are made synchronous",
                _MAXTEXT,
            ),
            (
                "xla_enable_async_all_reduce",
                "all-reduces are asynchronous, such as the sums of tensor parallelism",
                _MAXTEXT,
            ),
            (
                "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
                "fusions carry all-reduces under matrix products",
                _MAXTEXT,
            ),
            (
                "xla_enable_async_reduce_scatter_fusion",
                "reduce-scatters are asynchronous, such as the sums of fsdp's gradients",
                _RECIPES,
            ),
            (
                "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
                "fusions carry reduce-scatters under matrix products",
                _RECIPES,
            ),
        )
    ),
    *(
        CompilerOption(
            "tpu",
            f"xla_tpu_{collective}_collective_matmul_mode",
            "POST_SPMD_CONSERVATIVE",
            f"fewer products with {words} become rings of partial products and permutes; off, "
            "since 128 billion weights on 256 v5e, with tensor parallelism, are planned 18% "
            "slower; fsdp alone gains 17% on eight v5p, so a search tries them",
            _VLLM,
            devices=None,
            variant=COLLECTIVE_PRODUCTS,
        )
        for collective, words in _TPU_COLLECTIVES
    ),
    *(
        CompilerOption(
            "tpu",
            f"xla_tpu_enable_windowed_einsum_for_{collective}",
            "False",
            f"products with {words} do not become loops of partial products and permutes; on for "
            "v5e, whose permutes are not asynchronous there: 128 billion weights on 256 chips are "
            "planned 26% faster; on other chips, where plans gain 8% to 32%, a search tries them",
            _MLPERF,
            devices=_V5E,
            variant=WHOLE_PRODUCTS,
        )
        for collective, words in _TPU_COLLECTIVES
    ),
    CompilerOption(
        "tpu",
        "xla_tpu_enable_async_all_to_all",
        "True",
        "all-to-alls are asynchronous, for experts' chunks; off, since it changes the schedule of "
        "every program with an all-to-all",
        _MOE,
        devices=None,
        variant=ALL_TO_ALLS,
    ),
    CompilerOption(
        "tpu",
        "xla_tpu_enable_async_ragged_all_to_all",
        "True",
        "ragged exchanges of dropless experts are asynchronous, so that the shared expert runs "
        "beside them; on since its authors measured steps of 64 v4 to be faster with it",
        _OLMOE,
        devices=_CORES,
    ),
    CompilerOption(
        "cuda",
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "computation is scheduled between the start and the end of collectives; off beside ragged "
        f"exchanges, {_WRONG_BESIDE}",
        _NVIDIA,
        if_ragged="False",
    ),
    *(
        CompilerOption(
            "cuda",
            f"xla_gpu_enable_pipelined_{collective}",
            "True",
            f"{words} of an iteration run beside the next or the one before; off on A100, where "
            "plans become slower, and beside ragged exchanges"
            f"{_NOT_IN_PARTS if collective == 'all_gather' else ''}",
            _NVIDIA,
            devices=_HOPPER_AND_LATER,
            variant=PIPELINED,
            suits_parts=collective != "all_gather",
            if_ragged="False",
        )
        for collective, words in _GPU_COLLECTIVES
    ),
    CompilerOption(
        "cuda",
        _OVERLAP_LIMIT,
        "4",
        "up to four collectives have streams of their own, so that weights travel between hosts "
        "while activations travel within them; off, since ragged exchanges are right only with one "
        f"collective in flight ({_RAGGED}); with tensor parallelism and no experts, plans over "
        "several hosts gain 5% to 10%, so a search tries it",
        _STREAMS,
        devices=None,
        variant=PARALLEL,
        if_ragged="1",
    ),
    CompilerOption(
        "cuda",
        "xla_gpu_enable_while_loop_double_buffering",
        "True",
        "loops are unrolled by two; off, since it hides 1% more for a longer compilation",
        _NVIDIA,
        devices=None,
    ),
    *(
        CompilerOption(
            "cuda",
            f"xla_gpu_{collective}_combine_threshold_bytes",
            "134217728",
            f"{words} are combined up to this size; off, since larger ones hide less",
            _NVIDIA,
            devices=None,
        )
        for collective, words in _GPU_COLLECTIVES
        if collective != "all_gather"
    ),
    CompilerOption(
        "cuda",
        "xla_gpu_all_gather_combine_threshold_bytes",
        "536870912",
        "the weights of a layer are gathered together, since large messages between hosts are "
        "faster; on where a loop gathers them one layer ahead, as with zero1; else off, since "
        "larger all-gathers hide less",
        _NVIDIA,
        needs_gathers_ahead=True,
    ),
    CompilerOption(
        "cuda",
        "xla_gpu_enable_triton_gemm",
        "False",
        "cuBLASLt computes products in FP8, which Triton would compute in bfloat16; on with "
        "`step.precision = 'fp8'` alone",
        _NATIVE_FP8,
        precision="fp8",
    ),
)


@DEFAULTS.register("table")
def defaults(platform: str, device_kind: str, traits: Traits) -> dict[str, str]:
    """Returns the options of the table that are on, by name; for the arguments see `is_on`."""
    values = {each.name: each.value_for(platform, device_kind, traits) for each in OPTIONS}
    return {name: value for name, value in values.items() if value}


def has_parallel_collectives(options: Mapping[str, str]) -> bool:
    """Returns whether a GPU's collectives may be in flight in several streams."""
    return int(options.get(_OVERLAP_LIMIT, 1)) > 1


def option_variants(device: Device, given: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Returns groups of options that steps for a device are compiled without, by name.

    Args:
      device: one of the devices, which need not be in this machine.
      given: `CompileOptions.compile_options`.
    """
    platform, known = platform_of(device), {text.partition("=")[0] for text in given}
    found: dict[str, tuple[str, ...]] = {}
    for each in OPTIONS:
        is_open = each.variant and each.platform == platform and each.name not in known
        if is_open and not each.is_on(platform, device.device_kind):
            options = found.get(each.variant, ())
            found[each.variant] = (*options, f"{each.name}={each.value}")
    return found


def notes_on_ragged_exchanges(
    program: Program, device: Device, options: Mapping[str, str]
) -> list[str]:
    """Returns what users should know about the options of a step with ragged exchanges."""
    platform = platform_of(device)
    if platform != "cuda" or not program.calls(RAGGED_EXCHANGE, platform):
        return []
    kept = [
        each.name
        for each in OPTIONS
        if each.if_ragged and options.get(each.name, each.if_ragged) != each.if_ragged
    ]
    if kept:
        return [
            f"`compile_options` keeps {', '.join(kept)}, with which ragged exchanges have computed "
            f"gradients that are not numbers ({_RAGGED}); leave them out"
        ]
    return [
        "nothing overlaps the ragged exchanges of this step, since XLA has computed wrong "
        f"gradients where something did ({_RAGGED}); other exchanges overlap with computation"
    ]
