"""Measured times of NCCL's collectives within a host, by chip, kind and number of GPUs.

NVIDIA measured them with nccl-tests for its AIConfigurator.
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = (
    "NVIDIA, AIConfigurator, nccl_perf: NCCL 2.27.3 on A100, 2.29.2 on H100 and B200, "
    "https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c4ca8e61b66ec108d86f223f8d559ce/"
    "aic-core/src/aiconfigurator_core/systems/data"
)
# Buffers in MiB, as nccl-tests counts them: one device's operand or result, whichever is larger.
MIB = (1, 4, 16, 64, 256)
# Chip -> (kind, GPUs) -> microseconds for the sizes of `MIB`.
MICROSECONDS: Mapping[str, Mapping[tuple[str, int], tuple[float, ...]]] = {
    "a100": {
        ("all-reduce", 2): (40.8, 55.8, 128.2, 391.5, 1430.1),
        ("all-reduce", 4): (29.8, 68.8, 183.5, 544.3, 1926.6),
        ("all-reduce", 8): (38.9, 77.3, 216.5, 595.3, 2182.5),
        ("all-gather", 2): (19.9, 43.3, 93.4, 266.3, 939.0),
        ("all-gather", 4): (22.5, 60.7, 118.5, 325.4, 1106.4),
        ("all-gather", 8): (26.8, 48.0, 135.0, 351.6, 1216.8),
        ("reduce-scatter", 2): (19.4, 41.2, 82.3, 230.3, 826.0),
        ("reduce-scatter", 4): (21.1, 56.7, 109.3, 303.3, 1034.8),
        ("reduce-scatter", 8): (23.4, 52.0, 123.4, 327.2, 1149.5),
        ("all-to-all", 2): (22.8, 38.2, 98.3, 243.0, 844.5),
        ("all-to-all", 4): (25.2, 41.4, 104.4, 312.0, 1070.6),
        ("all-to-all", 8): (25.8, 64.3, 114.3, 347.6, 1197.9),
    },
    "h100": {
        ("all-reduce", 2): (14.7, 33.1, 82.2, 254.6, 881.3),
        ("all-reduce", 4): (18.1, 42.2, 99.0, 330.4, 1181.0),
        ("all-reduce", 8): (25.4, 50.5, 121.9, 324.5, 1092.1),
        ("all-gather", 2): (11.3, 27.0, 56.0, 159.2, 548.5),
        ("all-gather", 4): (13.6, 37.0, 66.2, 195.1, 660.7),
        ("all-gather", 8): (17.1, 33.4, 68.9, 208.1, 728.8),
        ("reduce-scatter", 2): (10.7, 23.8, 53.2, 169.1, 585.1),
        ("reduce-scatter", 4): (11.6, 32.9, 59.3, 194.6, 678.4),
        ("reduce-scatter", 8): (14.6, 29.9, 69.7, 200.8, 721.7),
        ("all-to-all", 2): (14.8, 21.2, 53.0, 139.8, 494.7),
        ("all-to-all", 4): (15.6, 24.8, 68.9, 192.3, 702.3),
        ("all-to-all", 8): (15.6, 26.2, 75.7, 221.3, 763.9),
    },
    "b200": {
        ("all-reduce", 2): (14.2, 36.8, 53.4, 146.7, 521.3),
        ("all-reduce", 4): (19.0, 35.8, 95.8, 181.8, 659.1),
        ("all-reduce", 8): (30.1, 53.4, 99.1, 278.3, 715.4),
        ("all-gather", 2): (12.7, 23.2, 37.5, 95.0, 319.8),
        ("all-gather", 4): (14.9, 25.2, 57.9, 108.0, 367.3),
        ("all-gather", 8): (18.7, 29.2, 103.9, 137.5, 393.1),
        ("reduce-scatter", 2): (12.0, 22.0, 37.8, 99.0, 347.1),
        ("reduce-scatter", 4): (14.2, 24.4, 54.7, 107.5, 380.5),
        ("reduce-scatter", 8): (20.4, 27.2, 97.0, 136.2, 396.0),
        ("all-to-all", 2): (16.7, 21.8, 49.0, 126.9, 420.8),
        ("all-to-all", 4): (17.7, 24.2, 46.9, 124.8, 427.1),
        ("all-to-all", 8): (18.8, 26.5, 50.1, 138.8, 437.7),
    },
}
