"""Buckets: the few sizes that programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.decoding.kinds import SearchKind, StateShape
from lingvo_gshard.inference.programs.program_key import ADMIT, STEPS, ProgramKey

# Rows that one batch decodes together.
ROWS = (1, 8, 16, 32)
# Positions of a state; tokens of given texts where few programs are wanted.
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Tokens of the sources, and of the given texts, that enter a state together.
FINE_LENGTHS = (8, 16, 24, *(n for length in LENGTHS for n in (length, length * 3 // 2)))
# New texts enter when this share of the rows is free, or when all that wait can enter.
FREE_SHARE = 4


def fitting(sizes: Sequence[int], wanted: int, most: int | None = None) -> int:
    """Returns the smallest size that is enough, or the largest one.

    Args:
      sizes: ascending sizes.
      wanted: what is needed.
      most: no larger size is returned; None for no limit.
    """
    found = next((size for size in sizes if size >= wanted), sizes[-1])
    return found if most is None else min(found, most)


def keys(kind: SearchKind, shape: StateShape, batches: int) -> list[ProgramKey]:
    """Returns the keys of the programs that texts without given tokens need in a shape."""
    texts = entering(shape.rows, batches)
    admit = ProgramKey(ADMIT, kind, shape, texts, source=shape.memory_length)
    return [ProgramKey(STEPS, kind, shape), admit]


def entering(rows: int, batches: int) -> int:
    """Returns the number of texts that enter a state together.

    Args:
      rows: rows of the state.
      batches: batches that the devices decode at once.
    """
    return max(rows // FREE_SHARE, batches)
