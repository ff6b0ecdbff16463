"""Rules for the useful floating-point operations (FLOPs) that layers count in a step.

- A multiply-add counts as two operations.
- Only matrix products count. Embeddings, norms, activations, dropout, losses and the optimizer do
  not.
- Attention counts full rows, even if it is causal, packed or limited to a window.
- Avoidable work does not count: MoE dispatch, empty capacity slots and rematerialization.
"""

from __future__ import annotations

import dataclasses

# The gradient of a matrix product is two products of the same size.
FORWARD_AND_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class TokenShape:
    """The positions that one forward pass computes.

    Attributes:
      rows: Number of packed rows of the batch.
      length: Number of positions of a row.
      memory_length: Number of encoder positions that each row attends to; 0 without
        cross-attention.
    """

    rows: int
    length: int
    memory_length: int = 0

    @property
    def tokens(self) -> int:
        """The number of positions computed."""
        return self.rows * self.length
