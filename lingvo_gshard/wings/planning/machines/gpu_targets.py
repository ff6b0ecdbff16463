"""Descriptions of GPUs for XLA's compiler, which needs no GPU if it is given a description.

The figures come from three sources:
- NVIDIA's CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"
  (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities);
- NVIDIA's whitepaper of each architecture;
- XLA's own descriptions, for memory, clocks and caches as the driver reports them
  (https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs).
"""

from __future__ import annotations

import dataclasses

KIB = 2**10


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The common figures of GPUs of one compute capability.

    Attributes:
      has_own_features: whether the capability has instructions that later capabilities do not have,
        as in "9.0a".
      threads: most threads of a multiprocessor.
      shared_memory: bytes of shared memory of a multiprocessor. One block may use 1 KiB less.
    """

    capability: tuple[int, int]
    has_own_features: bool
    threads: int
    float32_units: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU as XLA's compiler sees it, without the memory. The driver reports `name`.

    `clock` is the highest rate in GHz, `cache` the bytes of the second-level cache.
    """

    architecture: Architecture
    name: str
    multiprocessors: int
    clock: float
    cache: int


HOPPER = Architecture((9, 0), True, 2048, 128, 228 * KIB)
ARCHITECTURES = {
    "ampere": Architecture((8, 0), False, 2048, 64, 164 * KIB),
    "ada": Architecture((8, 9), False, 1536, 128, 100 * KIB),
    "hopper": HOPPER,
    "blackwell": Architecture((10, 0), True, 2048, 128, 228 * KIB),
}


def description(target: GpuTarget, memory_bytes: int, memory_bandwidth: float) -> str:
    """Returns a GPU's description as text of XLA's GpuTargetConfigProto."""
    architecture = target.architecture
    major, minor = architecture.capability
    features = "ACCELERATED_FEATURES" if architecture.has_own_features else "NONE"
    return f"""
      platform_name: "CUDA"
      device_description_str: "{target.name}"
      dnn_version_info {{ major: 9 minor: 10 }}
      runtime_version {{ major: 12 minor: 8 }}
      gpu_device_info {{
        cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
        core_count: {target.multiprocessors}
        fpus_per_core: {architecture.float32_units}
        clock_rate_ghz: {target.clock}
        threads_per_warp: 32
        threads_per_block_limit: 1024
        threads_per_core_limit: {architecture.threads}
        registers_per_block_limit: 65536
        registers_per_core_limit: 65536
        shared_memory_per_block: {48 * KIB}
        shared_memory_per_block_optin: {architecture.shared_memory - KIB}
        shared_memory_per_core: {architecture.shared_memory}
        block_dim_limit_x: {2**31 - 1}
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        thread_dim_limit_x: 1024
        thread_dim_limit_y: 1024
        thread_dim_limit_z: 64
        l2_cache_size: {target.cache}
        memory_bandwidth: {memory_bandwidth:.0f}
        device_memory_size: {memory_bytes}
      }}
    """
