"""ProgramKey: identifies one program of a decoder."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.decoding.kinds import SearchKind, StateShape

PREPARE, ADMIT, STEPS, GATES = "prepare", "admit", "steps", "gates"


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """One program of a decoder.

    Attributes:
      name: PREPARE makes the weights for decoding from those of training. ADMIT lets texts into
        rows, STEPS adds tokens, and GATES tells which experts the tokens of complete texts visit.
      kind: how tokens are chosen; None for PREPARE.
      shape: the state before the call, or the sizes of the texts of GATES; None for PREPARE.
      texts: for ADMIT, the number of texts that enter together.
      given: for ADMIT, the number of positions for given tokens; 0 if no text has any.
      source: for ADMIT, the number of positions for the tokens of a source; 0 without sources.
    """

    name: str
    kind: SearchKind | None = None
    shape: StateShape | None = None
    texts: int = 0
    given: int = 0
    source: int = 0

    def __str__(self) -> str:
        """Returns a name that is valid for a file and that only equal keys have."""
        parts = [self.name]
        if self.kind:
            flags = [n for n in _FLAGS if getattr(self.kind, n)]
            parts += [f"beam{self.kind.beam}", *flags]
        if self.shape:
            parts.append(f"{self.shape.rows}x{self.shape.length}x{self.shape.memory_length}")
        if self.name == ADMIT:
            parts += [f"texts{self.texts}", f"given{self.given}", f"source{self.source}"]
        return "-".join(parts)


_FLAGS = tuple(f.name for f in dataclasses.fields(SearchKind) if f.name != "beam")
