"""All that the planner knows of GPUs: published figures, with their sources.

FIGURES has the form that chip_figures.py describes.
"""

from __future__ import annotations

from lingvo_gshard.wings.planning.machines.chip_figures import (
    AS_BFLOAT16,
    JAX,
    LIBTPU_NAMES,
    NO_SOURCE,
    NO_TPU,
    SIMILAR_CHIPS,
    SIMILAR_LINKS,
    price_of,
)
from lingvo_gshard.wings.planning.machines.gpu_targets import (
    ADA,
    AMPERE,
    BLACKWELL,
    HOPPER,
    MIB,
    GpuTarget,
)

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
_TARGETS = "the sources of wings/planning/machines/gpu_targets.py"
_MEDIANS = (
    "the median over shapes with at least 4,096 rows: NVIDIA, AIConfigurator, gemm_perf, "
    "https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c4ca8e61b66ec108d86f223f8d559ce/"
    "aic-core/src/aiconfigurator_core/systems/data/{0}"
)


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
    fp8_products: tuple[float | None, str] = (None, AS_BFLOAT16),
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
        "device_kinds": ((part_of_name,), JAX),
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
        "product_efficiency": products,
        "fp8_efficiency": fp8_products,
        "measured_links": (links, SIMILAR_LINKS),
        "failures": ("rsc1" if target.architecture is AMPERE else "llama3", SIMILAR_CHIPS),
        "target": (target, _TARGETS),
        "chip_configuration": ("", LIBTPU_NAMES),
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
_NVL72 = {"host_chips": (72, _RACK), "measured_links": ("gb200", SIMILAR_LINKS)}
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
        (price_of(32.7726 / 8, "us-east-1", "2024-01"), _EC2.format("p4d.24xlarge")),
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
        (price_of(40.96 / 8, "us-east-1", "2024-01"), _EC2.format("p4de.24xlarge")),
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
        (price_of(98.32 / 8, "us-east-1", "2024-01"), _EC2.format("p5.48xlarge")),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (None, NO_SOURCE),
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
        (price_of(30.13118 / 8, "us-east-1", "2024-12"), _EC2.format("g6e.48xlarge")),
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
        (price_of(13.3504 / 8, "us-east-1", "2024-12"), _EC2.format("g6.48xlarge")),
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
        return None, NO_SOURCE
    return rate / 2, _HALF.format(datasheet, f"PCI Express, {rate / 1e9:g} GB/s")


FIGURES = {
    key: {
        **figures,
        "matrix_unit": (0, NO_TPU),
        "host_bandwidth": _of_host(key, figures["name"][1]),
        "example": (f"gpu:{key}:8x{figures['host_chips'][0]}", "8 hosts, or 8 racks"),
    }
    for key, figures in _GPUS.items()
}
