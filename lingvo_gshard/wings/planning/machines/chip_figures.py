"""All that the planner knows of TPUs and CPUs: published figures, with their sources.

FIGURES maps a chip's key to its fields, and each field of `chips.Chip` to (figure, source). Figures
that are published per chip are divided by the chip's number of partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

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
_EPYC = "AMD EPYC 9654, https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html"
JAX = "jax.Device.device_kind, as the plugins for TPUs and NVIDIA GPUs set it"
NO_SOURCE = "not published"
_TYPICAL = ": about 15 GB/s of PCI Express for each chip"
_OF_POD = ": data-center network bandwidth per pod, divided by 256 chips"
GIB = 2**30
_NO_GPU, NO_TPU = "it is no GPU", "it is no TPU"
_MATRIX_UNITS = (
    "https://github.com/AI-Hypercomputer/maxtext, docs/guides/optimization/custom_model.md: 256 x"
    " 256 for v6e and TPU7x, 128 x 128 before; products of 128 on the larger unit have half the"
    " rate"
)
AS_BFLOAT16 = "not published: as in bfloat16"
LIBTPU_NAMES = "libtpu's names of configurations"
SIMILAR_LINKS = "the measured links that resemble the chip's most"
SIMILAR_CHIPS = "the measured chips that resemble the chip most"
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


def price_of(amount: float, region: str, date: str) -> dict:
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
        "device_kinds": ((name.removeprefix("TPU ").lower(),), JAX),
        "vector_flops": (None, NO_SOURCE),
        "usable_bytes": (usable * GIB, _LIBTPU),
        "torus_dimensions": (len(pod), page),
        "host_chips": (4, page),
        "pod_shape": (pod, page),
        "network_bandwidth": (None, NO_SOURCE),
        "host_bandwidth": (None, NO_SOURCE),
        "watts": (None, NO_SOURCE),
        "price": (None, NO_SOURCE),
        "example": (example, "a slice that exists"),
        "matrix_unit": (128, _MATRIX_UNITS),
        "product_efficiency": _TPU_PRODUCTS,
        "fp8_efficiency": (None, AS_BFLOAT16),
        "measured_links": ("v5p", SIMILAR_LINKS),
        "failures": ("tpu_v4", SIMILAR_CHIPS),
        "target": (None, _NO_GPU),
        "chip_configuration": ("", LIBTPU_NAMES),
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
        "price": (price_of(1.125, "us-central1", "2022-08"), _PRICING + ": v2-8, divided by 4"),
        "measured_links": ("v3", SIMILAR_LINKS),
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
        "price": (price_of(2.0, "us-central1", "2022-08"), _PRICING + ": v3-8, divided by 4"),
        "measured_links": ("v3", SIMILAR_LINKS),
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
        "price": (price_of(3.22, "us-central2", "2023-12"), _V5P_BLOG),
        "chip_configuration": ("megacore", LIBTPU_NAMES),
    },
    "v5e": _tpu("TPU v5e", _V5E, (16, 16), "v5e:16x16", 15.75)
    | {
        "device_kinds": (("v5 lite", "v5e"), JAX),
        "partitions": (1, _V5E + ": one core per chip"),
        "peak_flops": ({"bf16": 197e12, "f32": 197e12, "int8": 393e12}, _V5E + _ONE_PASS),
        "memory_bytes": (16 * GIB, _V5E),
        "memory_bandwidth": (819e9, _V5E),
        "links": (4, _V5E),
        "link_bandwidth": (50e9, _V5E + ": 400 GB/s over 4 links, both directions"),
        "host_chips": (4, _SCALING),
        "network_bandwidth": (6.4e12 / 256 / 8, _V5E + _OF_POD),
        "host_bandwidth": (15e9, _SCALING + _TYPICAL),
        "price": (price_of(1.2, "us", "2023-12"), _V5P_BLOG),
    },
    "v5p": _tpu("TPU v5p", _V5P, (16, 20, 28), "v5p:8x8x8", 95.74)
    | {
        "device_kinds": (("v5",), JAX),
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
        "price": (price_of(4.2, "us", "2023-12"), _V5P_BLOG),
    },
    "v6e": _tpu("TPU v6e", _V6E, (16, 16), "v6e:16x16", 31.25)
    | {
        "device_kinds": (("v6",), JAX),
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
        "price": (price_of(2.7, "us-east1", "2024-12"), _PRICING),
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


CPU = {
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
        "matrix_unit": (0, NO_TPU),
        "product_efficiency": (
            {2048: 195 / (2 * 113.6)},
            "our measurement: a float32 product of 2048 x 2048 matrices, 195 GFLOP/s on two cores"
            " of EPYC 9004",
        ),
        "fp8_efficiency": (None, AS_BFLOAT16),
        "measured_links": ("", "cores share memory"),
        "failures": ("llama3", SIMILAR_CHIPS),
        "target": (None, _NO_GPU),
        "chip_configuration": ("", LIBTPU_NAMES),
    },
}
