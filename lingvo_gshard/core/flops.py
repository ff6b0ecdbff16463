"""How much work a step does: the unit in which layers count their floating-point operations.

A multiply-add is two operations. Only matrix products are counted: embeddings, norms, activations,
dropout, losses and the optimizer are not. Rows count in full, whether packed, causal or seen
through an attention window. What a better program would do without is not counted either: dispatch,
empty capacity slots, and anything computed twice.
"""

from __future__ import annotations

import dataclasses

# A product's gradient is two products of its size.
FORWARD_AND_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class TokenShape:
    """The positions that one forward pass computes.

    Attributes:
      rows: packed rows of the batch.
      length: positions of a row.
      memory_length: positions of the memory that each row attends to; 0 without cross-attention.
    """

    rows: int
    length: int
    memory_length: int = 0

    @property
    def tokens(self) -> int:
        """The number of positions computed."""
        return self.rows * self.length
