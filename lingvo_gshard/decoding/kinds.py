"""The kind of a decoding program: how it chooses tokens, and the sizes of its state."""

from __future__ import annotations

import dataclasses

# Stands where a text has no given token. Every id from 0 on may be a token.
NO_TOKEN = -1

# Outputs of each step that the host reads: [B,W] arrays, and [B,W,e] arrays of END_RECORD with a
# value for each id that ends a text. A call returns them with a dimension of steps before.
TOKEN_RECORD = ("token_BW", "log_probability_BW")
END_RECORD = ("end_BWe", "end_log_probability_BWe")
BEAM_RECORD = (*TOKEN_RECORD, "parent_BW", *END_RECORD, "last_BW")


@dataclasses.dataclass(frozen=True)
class SearchKind:
    """The choice of tokens that a program is compiled for. Options of a request are data.

    Attributes:
      beam: W, the hypotheses of a row; 1 for greedy decoding and sampling.
      draws: whether tokens are drawn; else the best are taken. Only with a beam of 1.
      penalizes_repetition: whether tokens that occurred are less likely. Only with a beam of 1.
      restricts_tokens: whether rows have sets of tokens that they may choose.
      covers: whether the search rewards attention to all of the source. Only with a beam.
    """

    beam: int = 1
    draws: bool = False
    penalizes_repetition: bool = False
    restricts_tokens: bool = False
    covers: bool = False


@dataclasses.dataclass(frozen=True)
class StateShape:
    """The sizes of a state.

    Attributes:
      rows: B.
      length: T, positions of the ring.
      memory_length: K, positions of the source; 0 for a model without one.
    """

    rows: int
    length: int
    memory_length: int = 0

    def holds(self, other: StateShape) -> bool:
        """Returns whether texts that fit the other shape fit this one."""
        return (
            self.rows >= other.rows
            and self.length >= other.length
            and self.memory_length >= other.memory_length
        )


def record_names(kind: SearchKind) -> tuple[str, ...]:
    """Returns the names of what each step records for the host, in order."""
    return BEAM_RECORD if kind.beam > 1 else TOKEN_RECORD
