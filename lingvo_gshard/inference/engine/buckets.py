"""Buckets: the few sizes that programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

# Rows that are decoded together, and texts that enter together.
ROWS = (1, 8, 32)
# Positions of a state, and tokens of a source.
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Given tokens that are computed in one pass.
GIVEN = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def fitting(sizes: Sequence[int], wanted: int, most: int | None = None) -> int:
    """Returns the smallest size that is enough, or the largest one.

    Args:
      sizes: ascending sizes.
      wanted: what is needed.
      most: no larger size is returned; None for no limit.
    """
    found = next((size for size in sizes if size >= wanted), sizes[-1])
    return found if most is None else min(found, most)
