"""All that the planner knows of each chip: published figures, with their sources.

FIGURES maps a chip's key to its fields, and each field of `chips.Chip` to (figure, source). Figures
that are published per chip are divided by the chip's number of partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gshard.wings.planning.machines.gpu_targets import (
    ADA,
    AMPERE,
    BLACKWELL,
    HOPPER,
    MIB,
    GpuTarget,
)

_CLOUD = "Google Cloud documentation, {0}, https://cloud.google.com/tpu/docs/{1}"
_V2 = (
    "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7),"
    " 2020, table 3, https://doi.org/10.1145/3360307"
)
_V3 = _CLOUD.format("TPU v3", "v3")
_V4 = _CLOUD.format("TPU v4", "v4")
_V5E = _CLOUD.format("TPU v5e", "v5e")
_V5P = _CLOUD.format("TPU v5p", "v5p")
_V6E = _CLOUD.format("TPU v6e", "v6e")
_V7X = _CLOUD.format("TPU7x (Ironwood)", "tpu7x")
_LIBTPU = "the available memory that libtpu 0.0.42.1 reports when a program needs more"
_DESIGN = (
    "Norrie et al., The Design Process for Google's Training Chips: TPUv2 and TPUv3, IEEE Micro"
    " 41(2), 2021, https://doi.org/10.1109/MM.2021.3058217: 1,024 lanes times two vector operations"
    " per cycle times the clock rate"
)
_SCALING = (
    "Austin et al., How to Scale Your Model, part 2, https://jax-ml.github.io/scaling-book/tpus"
)
_PRICING = "https://cloud.google.com/tpu/pricing"
_V5P_BLOG = (
    "https://cloud.google.com/blog/products/ai-machine-learning/"
    "introducing-cloud-tpu-v5p-and-ai-hypercomputer, table of prices per chip-hour"
)
_ONE_PASS = "; one pass of the matrix unit takes bfloat16 operands, also for float32"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "NVIDIA DGX B200 datasheet, https://www.nvidia.com/en-us/data-center/dgx-b200/"
_GRACE = (
    "NVIDIA Blackwell datasheet, figures of one GPU of GB200 NVL72 and HGX B200, as in"
    " https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html"
)
_ULTRA = "Verda, figures of one GPU, https://verda.com/blog/gb300-nvl72-architecture"
_H20 = (
    "https://willitrunai.com/es/gpus/h20-96gb, for TF32 and multiprocessors"
    " https://zangshuxian.com/new/674733024499207168; float32 of 78 multiprocessors at 1.98 GHz"
)
_L4 = "NVIDIA L4 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "NVIDIA L40S GPU datasheet, https://www.nvidia.com/en-us/data-center/l40s/"
_HALF = "{0}: {1}, half of the rate of both directions"
_DENSE = ", without sparsity; float32 as TF32"
_TOTAL = (
    "the memory that the driver reports, as in XLA's description of the GPU,"
    " https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"
)
_SMI = "the memory that nvidia-smi reports, {0} MiB"
_PREALLOCATED = (
    "75% of the memory, which JAX preallocates unless XLA_PYTHON_CLIENT_MEM_FRACTION is set,"
    " https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
)
_EC2 = (
    "Amazon EC2 on-demand price of a {0} divided by its 8 GPUs, https://aws.amazon.com/ec2/pricing/"
)
_EPYC = "AMD EPYC 9654, https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html"
_JAX = "jax.Device.device_kind, as the plugins for TPUs and NVIDIA GPUs set it"
_NO_SOURCE = "not published"
_TYPICAL = ": about 15 GB/s of PCI Express for each chip"
_OF_POD = ": data-center network bandwidth per pod, divided by 256 chips"
GIB = 2**30
_NO_GPU, _NO_TPU = "it is no GPU", "it is no TPU"
_MATRIX_UNITS = (
    "https://github.com/AI-Hypercomputer/maxtext, docs/guides/optimization/custom_model.md: 256 x"
    " 256 for v6e and TPU7x, 128 x 128 before; products of 128 on the larger unit have half the"
    " rate"
)
_AS_BFLOAT16 = "not published: as in bfloat16"
_LIBTPU_NAMES = "libtpu's names of configurations"
_TARGETS = "the sources of wings/planning/machines/gpu_targets.py"
_SIMILAR_LINKS = "the measured links that resemble the chip's most"
_SIMILAR_CHIPS = "the measured chips that resemble the chip most"
_MEDIANS = (
    "the median over shapes with at least 4,096 rows: NVIDIA, AIConfigurator, gemm_perf, "
    "https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c4ca8e61b66ec108d86f223f8d559ce/"
    "aic-core/src/aiconfigurator_core/systems/data/{0}"
)
# The efficiency at one size stands for all sizes.
_TPU_PRODUCTS = (
    {4096: 0.85},
    "Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668, section 5: feed-forward and"
    " projection layers on TPU v3 reach more than 85% of peak;"
    " assumed for other generations too",
)
# Products of n x n matrices in bfloat16 on one of TPU7x's two cores: n -> TFLOP/s.
_TPU7X_RATES = {
    128: 2.59,
    256: 18.29,
    512: 105.08,
    1024: 349.73,
    2048: 679.28,
    4096: 892.94,
    16384: 950.13,
    32768: 956.38,
}
_TPU7X_PRODUCTS = (
    {size: rate / (2307 / 2) for size, rate in _TPU7X_RATES.items()},
    "https://github.com/AI-Hypercomputer/accelerator-microbenchmarks, Ironwood/"
    "Ironwood_Microbenchmarks_readme.md",
)


def _price(amount: float, region: str, date: str) -> dict:
    return {"amount": amount, "currency": "USD", "region": region, "date": date}


def _tpu(
    name: str, page: str, pod: tuple[int, ...], example: str, usable: float
) -> dict[str, tuple]:
    """Returns the figures that most TPUs have in common.

    Args:
      name: the product name.
      page: the source of most figures.
      pod: the shape of the largest slice.
      example: name of a slice that exists.
      usable: GiB of a device that a program may use.
    """
    return {
        "name": (name, page),
        "kind": ("tpu", page),
        "device_kinds": ((name.removeprefix("TPU ").lower(),), _JAX),
        "vector_flops": (None, _NO_SOURCE),
        "usable_bytes": (usable * GIB, _LIBTPU),
        "torus_dimensions": (len(pod), page),
        "host_chips": (4, page),
        "pod_shape": (pod, page),
        "network_bandwidth": (None, _NO_SOURCE),
        "host_bandwidth": (None, _NO_SOURCE),
        "watts": (None, _NO_SOURCE),
        "price": (None, _NO_SOURCE),
        "example": (example, "a slice that exists"),
        "matrix_unit": (128, _MATRIX_UNITS),
        "product_efficiency": _TPU_PRODUCTS,
        "fp8_efficiency": (None, _AS_BFLOAT16),
        "measured_links": ("v5p", _SIMILAR_LINKS),
        "failures": ("tpu_v4", _SIMILAR_CHIPS),
        "target": (None, _NO_GPU),
        "chip_configuration": ("", _LIBTPU_NAMES),
    }


FIGURES: dict[str, Mapping[str, tuple]] = {
    "v2": _tpu("TPU v2", _V2, (16, 16), "v2:16x16", 7.48)
    | {
        "partitions": (2, _V2 + ": two cores per chip, each with its own memory"),
        "peak_flops": ({"bf16": 46e12 / 2, "f32": 46e12 / 2}, _V2 + _ONE_PASS),
        "vector_flops": (2 * 1024 * 700e6, _DESIGN),
        "memory_bytes": (8 * GIB, _V2),
        "memory_bandwidth": (700e9 / 2, _V2),
        "links": (4, _V2),
        "link_bandwidth": (496e9 / 8, _V2 + ": 496 Gbit/s per link and direction"),
        "watts": (280, _V2 + ": thermal design power"),
        "price": (_price(1.125, "us-central1", "2022-08"), _PRICING + ": v2-8, divided by 4"),
        "measured_links": ("v3", _SIMILAR_LINKS),
    },
    "v3": _tpu("TPU v3", _V3, (32, 32), "v3:32x32", 15.48)
    | {
        "partitions": (2, _V3 + ": two cores per chip, each with its own memory"),
        "peak_flops": ({"bf16": 123e12 / 2, "f32": 123e12 / 2}, _V3 + _ONE_PASS),
        "vector_flops": (2 * 1024 * 940e6, _DESIGN),
        "memory_bytes": (16 * GIB, _V3),
        "memory_bandwidth": (900e9 / 2, _V3),
        "links": (4, _V2),
        "link_bandwidth": (656e9 / 8, _V2 + ": 656 Gbit/s per link and direction"),
        "watts": (220, _V3 + ": mean of the measured power"),
        "price": (_price(2.0, "us-central1", "2022-08"), _PRICING + ": v3-8, divided by 4"),
        "measured_links": ("v3", _SIMILAR_LINKS),
    },
    "v4": _tpu("TPU v4", _V4, (16, 16, 16), "v4:8x8x8", 30.75)
    | {
        "partitions": (1, _SCALING + ": the two cores of a chip act as one"),
        "peak_flops": ({"bf16": 275e12, "f32": 275e12, "int8": 275e12}, _V4 + _ONE_PASS),
        "memory_bytes": (32 * GIB, _V4),
        "memory_bandwidth": (1200e9, _V4),
        "links": (
            6,
            "Jouppi et al., TPU v4, ISCA 2023, table 4, https://arxiv.org/abs/2304.01433",
        ),
        "link_bandwidth": (
            50e9,
            "Jouppi et al., TPU v4, ISCA 2023, table 4: 6 links of 50 GB/s,"
            " https://arxiv.org/abs/2304.01433",
        ),
        "host_bandwidth": (16e9, _SCALING + ": PCI Express, each way"),
        "watts": (170, _V4 + ": mean of the measured power"),
        "price": (_price(3.22, "us-central2", "2023-12"), _V5P_BLOG),
        "chip_configuration": ("megacore", _LIBTPU_NAMES),
    },
    "v5e": _tpu("TPU v5e", _V5E, (16, 16), "v5e:16x16", 15.75)
    | {
        "device_kinds": (("v5 lite", "v5e"), _JAX),
        "partitions": (1, _V5E + ": one core per chip"),
        "peak_flops": ({"bf16": 197e12, "f32": 197e12, "int8": 393e12}, _V5E + _ONE_PASS),
        "memory_bytes": (16 * GIB, _V5E),
        "memory_bandwidth": (819e9, _V5E),
        "links": (4, _V5E),
        "link_bandwidth": (50e9, _V5E + ": 400 GB/s over 4 links, both directions"),
        "host_chips": (4, _SCALING),
        "network_bandwidth": (6.4e12 / 256 / 8, _V5E + _OF_POD),
        "host_bandwidth": (15e9, _SCALING + _TYPICAL),
        "price": (_price(1.2, "us", "2023-12"), _V5P_BLOG),
    },
    "v5p": _tpu("TPU v5p", _V5P, (16, 20, 28), "v5p:8x8x8", 95.74)
    | {
        "device_kinds": (("v5",), _JAX),
        "partitions": (1, _SCALING + ": the two cores of a chip act as one"),
        "peak_flops": (
            {"bf16": 459e12, "f32": 459e12, "int8": 918e12, "fp8": 459e12},
            _V5P + _ONE_PASS + "; int8: " + _SCALING,
        ),
        "memory_bytes": (96 * GIB, _SCALING),
        "memory_bandwidth": (2765e9, _V5P),
        "links": (6, _V5P),
        "link_bandwidth": (100e9, _V5P + ": 1200 GB/s over 6 links, both directions"),
        "host_chips": (4, _SCALING),
        "pod_shape": ((16, 20, 28), _SCALING),
        "network_bandwidth": (50e9 / 8, _V5P),
        "host_bandwidth": (15e9, _SCALING + _TYPICAL),
        "price": (_price(4.2, "us", "2023-12"), _V5P_BLOG),
    },
    "v6e": _tpu("TPU v6e", _V6E, (16, 16), "v6e:16x16", 31.25)
    | {
        "device_kinds": (("v6",), _JAX),
        "partitions": (1, _V6E + ": one core per chip"),
        "peak_flops": (
            {"bf16": 918e12, "f32": 918e12, "int8": 1836e12, "fp8": 918e12},
            _V6E + _ONE_PASS + "; fp8: " + _V7X,
        ),
        "memory_bytes": (32 * GIB, _V6E),
        "memory_bandwidth": (1638e9, _V6E),
        "links": (4, _V6E),
        "link_bandwidth": (100e9, _V6E + ": 800 GB/s over 4 links, both directions"),
        "host_chips": (4, _SCALING),
        "network_bandwidth": (25.6e12 / 256 / 8, _V6E + _OF_POD),
        "host_bandwidth": (32e9, _SCALING + ": PCI Express"),
        "matrix_unit": (256, _MATRIX_UNITS),
        "price": (_price(2.7, "us-east1", "2024-12"), _PRICING),
    },
    "tpu7x": _tpu("TPU7x", _V7X, (16, 24, 24), "tpu7x:8x8x8", 94.75)
    | {
        "partitions": (2, _V7X + ": two cores per chip, which libtpu lists as two devices"),
        "peak_flops": (
            {"bf16": 2307e12 / 2, "f32": 2307e12 / 2, "fp8": 4614e12 / 2},
            _V7X + _ONE_PASS,
        ),
        "memory_bytes": (96 * GIB, _V7X),
        "memory_bandwidth": (7380e9 / 2, _V7X),
        "links": (6, _V7X),
        "link_bandwidth": (100e9, _V7X + ": 1200 GB/s over 6 links, both directions"),
        "pod_shape": ((16, 24, 24), _V7X + ": 9,216 chips"),
        "network_bandwidth": (100e9 / 8 / 2, _V7X),
        "matrix_unit": (256, _MATRIX_UNITS),
        "product_efficiency": _TPU7X_PRODUCTS,
    },
}


def _medians(key: str, *shares: float) -> tuple[dict[float, float], str]:
    """Returns efficiencies by size, of products of 1e10, 10**10.5, 1e11 FLOPs and so on."""
    sizes = [(10 ** (10 + step / 2) / 2) ** (1 / 3) for step in range(len(shares))]
    return dict(zip(sizes, shares, strict=True)), _MEDIANS.format(key)


def _gpu(
    name: str,
    part_of_name: str,
    datasheet: str,
    tera: tuple[float, float, float, float | None, float],
    memory: tuple[float, float],
    network: tuple[float, str],
    link: tuple[float, str],
    watts: float,
    price: tuple[dict | None, str],
    target: GpuTarget,
    products: tuple[dict[float, float], str],
    memory_source: str = _TOTAL,
    fp8_products: tuple[float | None, str] = (None, _AS_BFLOAT16),
    links: str = "h100",
) -> dict:
    """Returns the figures of a GPU.

    Args:
      name: the product name.
      part_of_name: what jax's name of the GPU contains, in lower case.
      datasheet: the source of most figures.
      tera: peak TFLOP/s in bf16, TF32, int8, fp8 (None if there is none), and plain float32.
      memory: bytes, and bytes per second.
      network: bytes per second to other hosts in one direction, with its source.
      link: bytes per second to GPUs of the host, both directions together, with the kind of link.
      watts: thermal design power.
      price: the list price or None, with its source.
      target: how XLA's compiler sees the GPU.
      products: share of the peak in bfloat16 that products reach, by size, with its source.
      memory_source: the source of the memory's size.
      fp8_products: the share of large products in FP8, with its source; None for that in bfloat16.
      links: the value of `Chip.measured_links`.
    """
    switch = f"a switch of {link[1]} connects the GPUs of a host: no torus"
    return {
        "name": (name, datasheet),
        "kind": ("gpu", datasheet),
        "device_kinds": ((part_of_name,), _JAX),
        "partitions": (1, datasheet),
        "peak_flops": (_peaks(*tera[:-1]), datasheet + _DENSE),
        "vector_flops": (tera[-1] * 1e12, datasheet + ": float32 without tensor cores"),
        "memory_bytes": (memory[0], memory_source),
        "usable_bytes": (memory[0] * 0.75, _PREALLOCATED),
        "memory_bandwidth": (memory[1], datasheet),
        "links": (1, switch),
        "link_bandwidth": (link[0] / 2, _HALF.format(datasheet, link[1])),
        "torus_dimensions": (0, switch),
        "host_chips": (8, datasheet),
        "pod_shape": ((), switch),
        "network_bandwidth": network,
        "watts": (watts, datasheet + ": thermal design power"),
        "price": price,
        "matrix_unit": (0, _NO_TPU),
        "product_efficiency": products,
        "fp8_efficiency": fp8_products,
        "measured_links": (links, _SIMILAR_LINKS),
        "failures": ("rsc1" if target.architecture is AMPERE else "llama3", _SIMILAR_CHIPS),
        "target": (target, _TARGETS),
        "chip_configuration": ("", _LIBTPU_NAMES),
    }


def _peaks(bf16: float, tf32: float, int8: float, fp8: float | None) -> dict[str, float]:
    rates = {"bf16": bf16, "f32": tf32, "int8": int8} | ({} if fp8 is None else {"fp8": fp8})
    return {kind: tera * 1e12 for kind, tera in rates.items()}


_DGX = "NVIDIA DGX {0} datasheet: one network adapter of {1} Gbit/s per GPU"
_REFERENCE = (
    "NVIDIA Enterprise Reference Architectures, configuration 2-8-5-200: 200 Gbit/s per GPU,"
    " https://docs.nvidia.com/enterprise-reference-architectures/"
)
_EC2_NETWORK = (
    "Amazon EC2 {0}: {1} Gbit/s for 8 GPUs, https://aws.amazon.com/ec2/instance-types/"
    "accelerated-computing/"
)

_A100_PRODUCTS = _medians("a100_sxm", 0.56, 0.737, 0.809, 0.84, 0.833, 0.838, 0.83)
_H100_PRODUCTS = _medians("h100_sxm", 0.653, 0.71, 0.758, 0.787, 0.796, 0.782, 0.735, 0.745)
_B200_PRODUCTS = _medians("b200_sxm", 0.53, 0.641, 0.631, 0.637, 0.67, 0.696, 0.681, 0.599)
_B200_FP8 = (0.613, _MEDIANS.format("b200_sxm") + ": TensorRT-LLM 1.3.0rc20, 1e13 FLOPs")
_H100_FP8 = (0.648, _MEDIANS.format("h100_sxm") + ": TensorRT-LLM 1.3.0rc20, 1e13 FLOPs")
_RACK = (
    "NVIDIA DGX GB200 user guide: racks of 72 GPUs in one domain of NVLink, with one adapter of 400"
    " Gbit/s (ConnectX-7) per GPU, https://docs.nvidia.com/dgx/dgxgb200-user-guide/hardware.html"
)
_CONNECTX_8 = (
    "one adapter of 800 Gbit/s (ConnectX-8) per GPU,"
    " https://vendordeep.com/report/nvidia-launches-blackwell-ultra-gb300 and"
    " https://docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory/latest/components.html"
)
# A rack counts as a host: NVLink connects all of its GPUs.
_NVL72 = {"host_chips": (72, _RACK), "measured_links": ("gb200", _SIMILAR_LINKS)}

_GPUS = {
    "a100-40gb": _gpu(
        "NVIDIA A100 40GB SXM",
        "a100-sxm4-40gb",
        _A100,
        (312, 156, 624, None, 19.5),
        (42_331_013_120, 1555e9),
        (200e9 / 8, _DGX.format("A100", 200)),
        (600e9, "NVLink"),
        400,
        (_price(32.7726 / 8, "us-east-1", "2024-01"), _EC2.format("p4d.24xlarge")),
        GpuTarget(AMPERE, "NVIDIA A100-SXM4-40GB", 108, 1.41, 40 * MIB),
        _A100_PRODUCTS,
        links="a100",
    ),
    "a100": _gpu(
        "NVIDIA A100 80GB SXM",
        "a100",
        _A100,
        (312, 156, 624, None, 19.5),
        (85_100_068_864, 2039e9),
        (200e9 / 8, _DGX.format("A100", 200)),
        (600e9, "NVLink"),
        400,
        (_price(40.96 / 8, "us-east-1", "2024-01"), _EC2.format("p4de.24xlarge")),
        GpuTarget(AMPERE, "NVIDIA A100-SXM4-80GB", 108, 1.41, 40 * MIB),
        _A100_PRODUCTS,
        links="a100",
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM",
        "h100",
        _H100,
        (989.5, 494.5, 1979, 1979, 67),
        (84_942_979_072, 3350e9),
        (400e9 / 8, _DGX.format("H100", 400)),
        (900e9, "NVLink"),
        700,
        (_price(98.32 / 8, "us-east-1", "2024-01"), _EC2.format("p5.48xlarge")),
        GpuTarget(HOPPER, "NVIDIA H100 80GB HBM3", 132, 1.98, 50 * MIB),
        _H100_PRODUCTS,
        fp8_products=_H100_FP8,
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM",
        "h200",
        _H200,
        (989.5, 494.5, 1979, 1979, 67),
        (151_397_597_184, 4800e9),
        (400e9 / 8, _DGX.format("H200", 400)),
        (900e9, "NVLink"),
        700,
        (None, _NO_SOURCE),
        GpuTarget(HOPPER, "NVIDIA H200", 132, 1.98, 50 * MIB),
        _H100_PRODUCTS,
        fp8_products=_H100_FP8,
    ),
    "b200": _gpu(
        "NVIDIA B200 SXM",
        "b200",
        _B200,
        (2250, 1125, 4500, 4500, 75),
        (191_514_411_008, 8000e9),
        (400e9 / 8, _DGX.format("B200", 400)),
        (1800e9, "NVLink"),
        1000,
        (None, _NO_SOURCE),
        GpuTarget(BLACKWELL, "NVIDIA B200", 148, 1.965, 132_644_864),
        _B200_PRODUCTS,
        fp8_products=_B200_FP8,
        links="b200",
    ),
    # The compiler that makes plans knows capability 10.0, not 10.3 of a GB300 and a B300. The
    # published float32 rate needs 148 multiprocessors; XLA's description has 158.
    "b300": _gpu(
        "NVIDIA B300 SXM",
        "b300",
        _ULTRA,
        (2250, 1100, 150, 4500, 75),
        (297_021_865_984, 7700e9),
        (800e9 / 8, _CONNECTX_8),
        (1800e9, "NVLink"),
        1100,
        (None, _NO_SOURCE),
        GpuTarget(BLACKWELL, "NVIDIA B300", 148, 1.965, 135_528_448),
        _B200_PRODUCTS,
        fp8_products=_B200_FP8,
        links="b200",
    ),
    "gb200": _gpu(
        "NVIDIA GB200 NVL72",
        "gb200",
        _GRACE,
        (2500, 1250, 5000, 5000, 80),
        (197_897_748_480, 8000e9),
        (400e9 / 8, _RACK),
        (1800e9, "NVLink"),
        1200,
        (None, _NO_SOURCE),
        GpuTarget(BLACKWELL, "NVIDIA GB200", 152, 2.062, 135_528_448),
        _B200_PRODUCTS,
        fp8_products=_B200_FP8,
    )
    | _NVL72,
    "gb300": _gpu(
        "NVIDIA GB300 NVL72",
        "gb300",
        _ULTRA,
        (2500, 1250, 165, 5000, 80),
        (297_021_079_552, 8000e9),
        (800e9 / 8, _CONNECTX_8),
        (1800e9, "NVLink"),
        1400,
        (None, _NO_SOURCE),
        GpuTarget(BLACKWELL, "NVIDIA GB300", 152, 2.07, 135_528_448),
        _B200_PRODUCTS,
        fp8_products=_B200_FP8,
    )
    | _NVL72,
    "h20": _gpu(
        "NVIDIA H20",
        "h20",
        _H20,
        (148, 74, 296, 296, 39.5),
        (97_871 * 2**20, 4000e9),
        (
            400e9 / 8,
            "two hosts of eight H20 with an adapter of 400 Gbit/s per GPU,"
            " https://github.com/NVIDIA/nccl/issues/1244",
        ),
        (900e9, "NVLink"),
        400,
        (None, _NO_SOURCE),
        # The clock is an H100's; the cache is of https://ke60.top/article/1471031.html.
        GpuTarget(HOPPER, "NVIDIA H20", 78, 1.98, 60 * MIB),
        _H100_PRODUCTS,
        _SMI.format("97,871") + ", https://github.com/NVIDIA/nvtrust/issues/128",
        fp8_products=_H100_FP8,
    ),
    # NVLink bridges connect pairs only, so a group of eight communicates over PCI Express.
    "h100-pcie": _gpu(
        "NVIDIA H100 PCIe",
        "h100 pcie",
        _H100,
        (756, 378, 1513, 1513, 51),
        (84_942_979_072, 2039e9),
        (200e9 / 8, _REFERENCE),
        (128e9, "PCI Express 5.0 x16"),
        350,
        (None, _NO_SOURCE),
        GpuTarget(HOPPER, "NVIDIA H100 PCIe", 114, 1.755, 50 * MIB),
        _H100_PRODUCTS,
        fp8_products=_H100_FP8,
    ),
    "l40s": _gpu(
        "NVIDIA L40S",
        "l40s",
        _L40S,
        (362.05, 183, 733, 733, 91.6),
        (46_068 * 2**20, 864e9),
        (400e9 / 8 / 8, _EC2_NETWORK.format("g6e.48xlarge", 400)),
        (64e9, "PCI Express 4.0 x16"),
        350,
        (_price(30.13118 / 8, "us-east-1", "2024-12"), _EC2.format("g6e.48xlarge")),
        GpuTarget(ADA, "NVIDIA L40S", 142, 2.52, 96 * MIB),
        _A100_PRODUCTS,
        _SMI.format("46,068"),
    ),
    "l4": _gpu(
        "NVIDIA L4",
        "l4",
        _L4,
        (121, 60, 242.5, 242.5, 30.3),
        (23_034 * 2**20, 300e9),
        (100e9 / 8 / 8, _EC2_NETWORK.format("g6.48xlarge", 100)),
        (64e9, "PCI Express 4.0 x16"),
        72,
        (_price(13.3504 / 8, "us-east-1", "2024-12"), _EC2.format("g6.48xlarge")),
        GpuTarget(ADA, "NVIDIA L4", 58, 2.04, 48 * MIB),
        _A100_PRODUCTS,
        _SMI.format("23,034"),
    ),
}

# Bytes per second of PCI Express in both directions together, where the datasheet states them.
_PCI_EXPRESS: dict[str, float] = {key: 64e9 for key in ("a100-40gb", "a100", "l40s", "l4")}
_PCI_EXPRESS |= {key: 128e9 for key in ("h100", "h100-pcie", "h200")}


def _of_host(key: str, datasheet: str) -> tuple[float | None, str]:
    """Returns a GPU's rate to its host in one direction, with its source."""
    rate = _PCI_EXPRESS.get(key)
    if rate is None:
        return None, _NO_SOURCE
    return rate / 2, _HALF.format(datasheet, f"PCI Express, {rate / 1e9:g} GB/s")


FIGURES |= {
    key: {
        **figures,
        "host_bandwidth": _of_host(key, figures["name"][1]),
        "example": (f"gpu:{key}:8x{figures['host_chips'][0]}", "8 hosts, or 8 racks"),
    }
    for key, figures in _GPUS.items()
}
FIGURES |= {
    "cpu": {
        "name": ("core of AMD EPYC 9654", _EPYC),
        "kind": ("cpu", _EPYC),
        "device_kinds": ((), "jax gives every CPU the same name"),
        "partitions": (1, "a partition is one core"),
        "peak_flops": (
            {"bf16": 64 * 3.55e9, "f32": 32 * 3.55e9, "int8": 128 * 3.55e9},
            _EPYC + ": 3.55 GHz on all cores, two 256-bit multiply-adds per cycle",
        ),
        "vector_flops": (32 * 3.55e9, _EPYC),
        "memory_bytes": (
            8 * GIB,
            "8 GiB per core, as in c3d-standard machines, https://cloud.google.com/compute/docs/"
            "general-purpose-machines#c3d_series",
        ),
        "usable_bytes": (8 * GIB, "the CPU compiler has no limit of its own"),
        "memory_bandwidth": (460.8e9 / 96, _EPYC + ": 460.8 GB/s per socket, divided by 96 cores"),
        "links": (0, "cores share memory"),
        "link_bandwidth": (0.0, "cores share memory"),
        "torus_dimensions": (0, "cores share memory"),
        "host_chips": (96, _EPYC),
        "pod_shape": ((), "cores share memory"),
        "network_bandwidth": (None, "a CPU topology is a single machine"),
        "host_bandwidth": (None, "a CPU is its own host"),
        "watts": (360 / 96, _EPYC + ": default TDP of a socket, divided by 96 cores"),
        "price": (None, "single cores are not for rent"),
        "example": ("cpu:8", "eight cores"),
        "matrix_unit": (0, _NO_TPU),
        "product_efficiency": (
            {2048: 195 / (2 * 113.6)},
            "our measurement: a float32 product of 2048 x 2048 matrices, 195 GFLOP/s on two cores"
            " of EPYC 9004",
        ),
        "fp8_efficiency": (None, _AS_BFLOAT16),
        "measured_links": ("", "cores share memory"),
        "failures": ("llama3", _SIMILAR_CHIPS),
        "target": (None, _NO_GPU),
        "chip_configuration": ("", _LIBTPU_NAMES),
    },
}
