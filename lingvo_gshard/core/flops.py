"""TokenShape: the positions that one forward pass computes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TokenShape:
    """The positions that one forward pass computes.

    Attributes:
      rows: Number of packed rows of the batch.
      length: Number of positions of a row.
      memory_length: Number of encoder positions that each row attends to; 0 without
        cross-attention.
      has_pairs: Whether products of queries with keys, and of their weights with values, count.
    """

    rows: int
    length: int
    memory_length: int = 0
    has_pairs: bool = True

    @property
    def tokens(self) -> int:
        """The number of positions computed."""
        return self.rows * self.length
