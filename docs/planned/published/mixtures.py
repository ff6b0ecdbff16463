"""Published measurements of trainings with experts, and how each is planned.

Routing was forced to be balanced in Megatron Bridge's trainings, and loads are even in every plan.
"""

from __future__ import annotations

from docs.planned.published import decoders
from docs.planned.published.decoders import Mixture
from docs.planned.published.training import Training

_BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md"
)
_FULL, _PRODUCTS, _NONE = "full", "products", "none"
_GATHERED = (
    "weights split over all hosts and gathered for each layer, where the original has stages of a "
    "pipeline"
)
_RECOMPUTED = "what lies between products is recomputed, where the original recomputes nothing"
_SOME = (
    "what lies between products is recomputed, where the original recomputes norms and activations"
)
_ONE_TOKEN = "; without the layers that predict a second token"
_TERM = (
    "weights of experts and their gradients, which cross between hosts in each layer and "
    "micro-batch, where stages of the original keep their weights"
)
_EVERYTHING = "everything is recomputed, where the original recomputes nothing or little"


def _bridge(
    name: str,
    decoder: Mixture,
    machine: str,
    container: str,
    precision: str,
    mesh: str,
    strategy: str,
    rows: int,
    passes: int,
    policy: str,
    tokens: float,
    planned: str,
    term: str = "",
) -> Training:
    """Returns a row of Megatron Bridge's summaries, with rows of 4,096 positions.

    Its recipes for measurements add up gradients in 16 bits
    (src/megatron/bridge/perf_recipes/_common.py).
    """
    chip, hosts = machine.split(":")
    suffix = {"fp8": " FP8", "mxfp8": " MXFP8"}.get(precision, "")
    return Training(
        key=f"megatron-bridge {container} {decoder.key}{suffix.lower()} {chip}",
        name=f"{name}{suffix}",
        publisher=f"Megatron Bridge {container}",
        source=f"{_BRIDGE}#{container.replace('.', '')}-nemo-container",
        decoder=decoder,
        topology=f"gpu:{chip}:{hosts}",
        mesh=mesh,
        strategy=strategy,
        rows=rows,
        length=4096,
        rematerialize=policy,
        precision=precision,
        tokens=tokens,
        planned=planned,
        segments=16,
        passes=passes,
        # As `grad_reduce_in_fp32 = False` in the original.
        settings=('step.reduce_dtype = "bfloat16"',),
        term=term,
    )


_H800 = (
    "the mean over 14.8T tokens, failures included; H100 in place of H800, whose NVLink has 400 "
    "GB/s; batch of 16,384 rows in place of 15,360"
)

TRAININGS = (
    _bridge(
        "Qwen3 30B-A3B",
        decoders.QWEN_3_30B,
        "b200:1x8",
        "25.11",
        "mxfp8",
        "data=8",
        "expert_zero1",
        512,
        64,
        _PRODUCTS,
        9299,
        _RECOMPUTED,
        term=(
            "container 26.02.01 of the original is 2.9 times as fast on the same GPUs, with four "
            "rows in a micro-batch"
        ),
    ),
    _bridge(
        "Qwen3 30B-A3B",
        decoders.QWEN_3_30B,
        "b200:1x8",
        "26.02.01",
        "mxfp8",
        "data=8",
        "expert_zero1",
        512,
        32,
        _PRODUCTS,
        26_695,
        f"{_RECOMPUTED}; micro-batches of 2 rows for a GPU in place of 4",
    ),
    _bridge(
        "Qwen3 30B-A3B",
        decoders.QWEN_3_30B,
        "h100:2x8",
        "25.11",
        "fp8",
        "fsdp=2,data=8",
        "expert_fsdp",
        512,
        16,
        _FULL,
        5275,
        f"{_GATHERED}; {_EVERYTHING}",
        term=(
            "container 26.02.01 of the original is 1.7 times as fast with the same layout; ours "
            "gathers the weights of experts between hosts, which takes 24% of its step"
        ),
    ),
    _bridge(
        "Qwen3 30B-A3B",
        decoders.QWEN_3_30B,
        "h100:2x8",
        "26.04",
        "fp8",
        "data=16",
        "expert_zero1",
        1024,
        64,
        _FULL,
        8901,
        _EVERYTHING,
        term=(
            "exchange: all tokens and float32 sums of 16 GPUs cross the network, 55% of the step "
            "exposed; HybridEP sends a token once to a host"
        ),
    ),
    _bridge(
        "gpt-oss 120B",
        decoders.GPT_OSS_120B,
        "b200:8x8",
        "25.11",
        "bfloat16",
        "fsdp=8,data=8",
        "expert_zero1",
        512,
        4,
        _PRODUCTS,
        8213,
        f"{_SOME}; micro-batches of 2 rows for a GPU in place of 4",
    ),
    _bridge(
        "gpt-oss 120B",
        decoders.GPT_OSS_120B,
        "b200:8x8",
        "26.02.01",
        "bfloat16",
        "fsdp=8,data=8",
        "expert_zero1",
        1280,
        10,
        _PRODUCTS,
        13_722,
        f"{_SOME}; micro-batches of 2 rows for a GPU in place of 4",
    ),
    _bridge(
        "gpt-oss 120B",
        decoders.GPT_OSS_120B,
        "h100:8x8",
        "25.11",
        "bfloat16",
        "fsdp=8,data=8",
        "expert_fsdp",
        512,
        2,
        _FULL,
        5630,
        f"{_GATHERED}; {_EVERYTHING}",
        term=_TERM,
    ),
    _bridge(
        "gpt-oss 120B",
        decoders.GPT_OSS_120B,
        "gb200:1x64",
        "26.04.01",
        "bfloat16",
        "data=64",
        "expert_zero1",
        1280,
        10,
        _PRODUCTS,
        16_640,
        f"{_SOME}; micro-batches of 2 rows for a GPU in place of 4",
    ),
    _bridge(
        "Qwen3 30B-A3B",
        decoders.QWEN_3_30B,
        "gb200:1x8",
        "26.06.01",
        "mxfp8",
        "data=8",
        "expert_zero1",
        512,
        32,
        _PRODUCTS,
        40_960,
        f"{_RECOMPUTED}; micro-batches of 2 rows for a GPU in place of 4",
        term=(
            "container 26.02.01 of the original has 26,373 tokens per second on the same GPUs, 1.1 "
            "times the estimate; ours waits for exchanges of tokens for 26% of its step"
        ),
    ),
    _bridge(
        "Qwen3 235B-A22B",
        decoders.QWEN_3_235B,
        "b200:8x8",
        "25.11",
        "mxfp8",
        "fsdp=8,data=8",
        "expert_fsdp",
        1024,
        4,
        _FULL,
        3269,
        _GATHERED,
        term=_TERM,
    ),
    _bridge(
        "Qwen3 235B-A22B",
        decoders.QWEN_3_235B,
        "b200:32x8",
        "26.04.01",
        "mxfp8",
        "fsdp=32,data=8",
        "expert_fsdp",
        8192,
        8,
        _FULL,
        3776,
        _GATHERED,
        term=_TERM,
    ),
    _bridge(
        "Qwen3 235B-A22B",
        decoders.QWEN_3_235B,
        "h100:32x8",
        "25.11",
        "fp8",
        "fsdp=32,data=8",
        "expert_fsdp",
        2048,
        2,
        _FULL,
        1575,
        _GATHERED,
    ),
    _bridge(
        "DeepSeek-V3",
        decoders.DEEPSEEK_V3,
        "b200:32x8",
        "25.11",
        "mxfp8",
        "fsdp=32,data=8",
        "expert_fsdp",
        2048,
        2,
        _FULL,
        2139,
        _GATHERED + _ONE_TOKEN,
        term=_TERM,
    ),
    _bridge(
        "DeepSeek-V3",
        decoders.DEEPSEEK_V3,
        "b200:32x8",
        "26.04.01",
        "mxfp8",
        "fsdp=32,data=8",
        "expert_fsdp",
        4096,
        4,
        _FULL,
        3328,
        _GATHERED + _ONE_TOKEN,
        term=_TERM,
    ),
    _bridge(
        "DeepSeek-V3",
        decoders.DEEPSEEK_V3,
        "h100:128x8",
        "25.09",
        "fp8",
        "fsdp=128,data=8",
        "expert_fsdp",
        8192,
        2,
        _FULL,
        1297,
        _GATHERED + _ONE_TOKEN,
        term=_TERM,
    ),
    Training(
        key="deepseek deepseek-v3 h800",
        name="DeepSeek-V3 FP8",
        publisher="DeepSeek",
        source="https://arxiv.org/abs/2412.19437",
        decoder=decoders.DEEPSEEK_V3,
        topology="gpu:h100:256x8",
        mesh="fsdp=256,data=8",
        strategy="expert_fsdp",
        rows=16_384,
        length=4096,
        rematerialize=_FULL,
        precision="fp8_blocks",
        # 14.8T tokens in 2.664M GPU hours, table 1 and section 3.4.
        tokens=14.8e12 / 2.664e6 / 3600,
        planned=f"{_GATHERED}; {_H800}{_ONE_TOKEN}",
        segments=16,
        passes=2,
        term=_TERM,
    ),
    Training(
        key="torchtitan deepseek-16b b200",
        name="DeepSeek-V3 16B",
        publisher="torchtitan",
        source="https://github.com/pytorch/torchtitan/pull/1993",
        decoder=decoders.DEEPSEEK_16B,
        topology="gpu:b200:1x8",
        mesh="data=8",
        strategy="fsdp",
        rows=48,
        length=4096,
        rematerialize=_PRODUCTS,
        # A utilization of 20% of its peak for B200 of 2,250 TFLOP/s.
        teraflops=0.20 * 2250,
        planned=_RECOMPUTED,
        segments=16,
        term=(
            "not known: the source is notes on settings, by which the same training rose from "
            "13.5% to 20% of the peak"
        ),
    ),
)
