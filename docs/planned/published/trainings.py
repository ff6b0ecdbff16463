"""Published measurements of trainings, and how each is planned.

Every figure is copied from its source. `planned` says what is set in its place where the source
does not say, or where this library has no such thing.
"""

from __future__ import annotations

from docs.planned.published import decoders, maxtext_recipes, mixtures
from docs.planned.published.training import Training

_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/tpu"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
_MIXTRAL = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/main/tests/end_to_end/tpu/mixtral/"
    "Run_Mixtral.md"
)
# Rematerialization: all products again, or what lies between products with weights.
_FULL, _PRODUCTS = "full", "products"
_OFFLOADED = "projections of attention recomputed, where the original keeps them on the host"
_BETWEEN = "activations between layers split by positions, where MaxText splits them by M"
_MINIMAL = "all products with weights saved, as its policy `minimal` does"
_SELECTIVE = "all products with weights saved; the original saves every second one"
_LOGITS = "; logits in bfloat16, as its conversion of all linear layers but the last"
_TITAN_2024 = "llama3_h100_202412_torchtitan.md"
_PARALLEL = "xla_gpu_experimental_parallel_collective_overlap_limit=4"
_ONE_PASS = "the batch in one pass, as micro-batches are not published"
_BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary.md"
    "#25-11-nemo-container"
)


def _maxtext(
    scale: int, slice_: str, chips: int, tensor: int, rows: int, policy: str, teraflops: float
) -> Training:
    """Returns a row of MaxText's tables: `rows` for each chip, FSDP over all other chips."""
    chip = slice_.split(":")[0]
    notes = [_BETWEEN] * (tensor > 1) + [_MINIMAL] * (policy == _PRODUCTS)
    notes += [_OFFLOADED] * ((scale, chip) == (128, "v5e"))
    return Training(
        key=f"maxtext {scale}b {chip}",
        name=f"{scale}B",
        publisher="MaxText",
        source=f"{_MAXTEXT}/{chip}",
        decoder=decoders.maxtext(scale),
        topology=slice_,
        mesh=_mesh(chips, tensor),
        strategy="fsdp_sequence_tensor" if tensor > 1 else "fsdp",
        rows=rows * chips,
        length=2048,
        rematerialize=policy,
        teraflops=teraflops,
        planned="; ".join(notes),
    )


def _mesh(chips: int, tensor: int) -> str:
    """Returns a mesh with `tensor` chips along `model` and all others along `data`."""
    return f"data={chips // tensor},model={tensor}" if tensor > 1 else f"data={chips}"


def _titan(name: str, key: str, file: str, precision: str, **facts: object) -> Training:
    """Returns a row of torchtitan's tables, which have FP8 beside bfloat16."""
    suffix = " FP8" if precision == "fp8" else ""
    return Training(
        key=f"torchtitan {key}{suffix.lower()}",
        name=f"{name}{suffix}",
        publisher="torchtitan",
        source=f"{_TITAN}/{file}",
        length=8192,
        precision=precision,
        **facts,  # pyright: ignore[reportArgumentType]
    )


def _titan_8b(hosts: int, tokens: float, precision: str = "bfloat16") -> Training:
    """Returns a row of the tables of Llama 3.1 8B: FSDP over all GPUs, compiled."""
    return _titan(
        "Llama 3.1 8B",
        f"llama-3.1-8b {8 * hosts}",
        _TITAN_2024,
        precision,
        tokens=tokens,
        decoder=decoders.LLAMA_3_8B,
        topology=f"gpu:h100:{hosts}x8",
        mesh=f"data={8 * hosts}",
        strategy="fsdp",
        rows=16 * hosts,
        rematerialize=_PRODUCTS,
        planned=_SELECTIVE + (_LOGITS if precision == "fp8" else ""),
    )


def _titan_70b(tokens: float, file: str, precision: str = "bfloat16") -> Training:
    """Returns a row of the tables of Llama 3.1 70B: FSDP over 32 and tensor parallelism over 8."""
    return _titan(
        "Llama 3.1 70B",
        "llama-3.1-70b 256",
        file,
        precision,
        tokens=tokens,
        decoder=decoders.LLAMA_3_70B,
        topology="gpu:h100:32x8",
        mesh="data=32,model=8",
        strategy="fsdp_sequence_tensor",
        rows=512,
        rematerialize=_FULL,
        planned="length 8,192, as in its file for this model",
    )


def _megatron_a100(
    name: str, sizes: tuple[int, int, int], hosts: int, tensor: int, rows: int, teraflops: float
) -> Training:
    """Returns a row of the table of arXiv 2104.04473 without pipeline: layers, M, heads."""
    return Training(
        key=f"megatron {name} a100",
        name=name,
        publisher="Megatron-LM",
        source="https://arxiv.org/abs/2104.04473",
        decoder=decoders.megatron(*sizes, vocabulary=51_200, is_tied=True),
        topology=f"gpu:a100:{hosts}x8",
        mesh=_mesh(hosts * 8, tensor),
        strategy="data_tensor" if tensor > 1 else "data",
        rows=rows,
        length=2048,
        rematerialize=_FULL,
        teraflops=teraflops,
        recomputes=True,
        planned=_ONE_PASS,
    )


def _megatron_h100(
    name: str, sizes: tuple[int, int, int], hosts: int, tensor: int, teraflops: float
) -> Training:
    """Returns a row of the table in Megatron-LM's README of 2024 without pipeline."""
    return Training(
        key=f"megatron {name} h100",
        name=name,
        publisher="Megatron-LM",
        source=f"{_MEGATRON}#performance-benchmarking",
        decoder=decoders.megatron(*sizes, vocabulary=131_072, is_tied=False),
        topology=f"gpu:h100:{hosts}x8",
        mesh=_mesh(hosts * 8, tensor),
        strategy="zero1_sequence_tensor" if tensor > 1 else "zero1",
        rows=192,
        length=4096,
        rematerialize=_PRODUCTS,
        teraflops=teraflops,
        planned=f"all products with weights saved, as recomputation is not published; {_ONE_PASS}; "
        "collectives within and between hosts at the same time, as in the original: "
        f"`{_PARALLEL}`",
        compile_options=(_PARALLEL,),
    )


def _bridge_8b(chip: str, strategy: str, passes: int, rows: int, tokens: float) -> Training:
    """Returns a row of Megatron Bridge's tables of Llama 3 8B in FP8, with `rows` for each chip."""
    return Training(
        key=f"megatron-bridge llama-3-8b fp8 {chip}",
        name="Llama 3 8B FP8",
        publisher="Megatron Bridge",
        source=_BRIDGE,
        decoder=decoders.LLAMA_3_8B,
        topology=f"gpu:{chip}:1x8",
        mesh="data=8",
        strategy=strategy,
        rows=8 * rows,
        length=8192,
        rematerialize=_PRODUCTS,
        precision="fp8",
        tokens=tokens,
        planned=f"one micro-batch, where the original adds up {passes}; rows of up to 16 texts",
        segments=16,
    )


TRAININGS = (
    _maxtext(16, "v5e:16x16", 256, 1, 6, _FULL, 120),
    _maxtext(32, "v5e:16x16", 256, 1, 4, _FULL, 132),
    _maxtext(64, "v5e:16x16", 256, 1, 2, _FULL, 118),
    _maxtext(128, "v5e:16x16", 256, 16, 1, _FULL, 110),
    _maxtext(32, "v5p:4x4x4", 64, 4, 6, _PRODUCTS, 328),
    _maxtext(64, "v5p:4x4x4", 64, 4, 3, _PRODUCTS, 323),
    _maxtext(128, "v5p:4x4x8", 128, 8, 1, _PRODUCTS, 315),
    _maxtext(256, "v5p:8x8x8", 512, 8, 1, _PRODUCTS, 308),
    _maxtext(512, "v5p:8x8x8", 512, 8, 2, _FULL, 294),
    _maxtext(1024, "v5p:8x16x16", 2048, 16, 2, _FULL, 297),
    Training(
        key="maxtext mixtral-8x7b v5p",
        name="Mixtral 8x7B",
        publisher="MaxText",
        source=_MIXTRAL,
        decoder=decoders.MIXTRAL_8X7B,
        topology="v5p:4x4x4",
        mesh="data=64",
        strategy="fsdp",
        rows=32 * 64,
        length=1024,
        rematerialize=_FULL,
        teraflops=251.94,
        planned=(
            "batch, length, FSDP and recomputation are not published: those of its recipe for v6e,"
            " `v6e/mixtral_8x7b.sh`; buffers that hold just the balanced load, where the original"
            " computes without buffers"
        ),
    ),
    _titan_8b(1, 6667),
    _titan_8b(16, 6514),
    _titan_70b(597.3, "asyncTP_llama3_h100_2025-06_torchtitan.md"),
    _titan_8b(1, 8532, "fp8"),
    _titan_8b(16, 8380, "fp8"),
    _titan_70b(829, _TITAN_2024, "fp8"),
    _bridge_8b("h100", "fsdp", 16, 1, 14451),
    _bridge_8b("b200", "zero1", 8, 2, 30624),
    _bridge_8b("gb200", "zero1", 8, 2, 31508),
    _bridge_8b("gb300", "zero1", 8, 2, 37556),
    _megatron_a100("1.7B", (24, 2304, 24), 4, 1, 512, 137),
    _megatron_a100("7.5B", (36, 4096, 32), 16, 4, 512, 142),
    _megatron_a100("18.4B", (40, 6144, 48), 32, 8, 1024, 135),
    _megatron_h100("7.1B", (30, 4096, 32), 12, 2, 465.9),
    _megatron_h100("16B", (32, 6144, 48), 24, 4, 489.1),
    _megatron_h100("32B", (48, 7168, 56), 48, 8, 459.6),
    *maxtext_recipes.TRAININGS,
    *mixtures.TRAININGS,
)
