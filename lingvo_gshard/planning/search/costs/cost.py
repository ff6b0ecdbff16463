"""Cost: seconds and bytes of one device in one step, and how costs add up."""

from __future__ import annotations

import collections
import dataclasses

from lingvo_gshard.planning.search.resharding import Collective

FORWARD, BACKWARD, REMATERIALIZED, OPTIMIZER = "forward", "backward", "rematerialized", "optimizer"


@dataclasses.dataclass
class Cost:
    """Seconds and bytes of one device in one step.

    Attributes:
      compute_seconds: time of einsums, lookups and the optimizer.
      communication_seconds: time of collectives.
      flops: floating-point operations.
      weights: bytes of weights.
      moments: bytes of optimizer moments.
      saved: bytes of activations that are saved for the backward pass.
      recomputed: bytes of activations that one rematerialization unit recomputes.
      gradients: bytes of all weight gradients.
      stacked_gradients: bytes of weight gradients of loops, allocated before the backward pass.
      workspace: bytes of the tensors and gradients of the largest einsum.
      calls: (collective, phase, number of executions).
    """

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    flops: int = 0
    weights: int = 0
    moments: int = 0
    saved: int = 0
    recomputed: int = 0
    gradients: int = 0
    stacked_gradients: int = 0
    workspace: int = 0
    calls: list[tuple[Collective, str, int]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Returns the time without overlap of computation and communication."""
        return self.compute_seconds + self.communication_seconds

    @property
    def resident(self) -> tuple[int, int]:
        """Returns the bytes, without `workspace`, at the start and the end of the backward pass."""
        state = self.weights + self.moments + self.recomputed
        return state + self.saved + self.stacked_gradients, state + self.gradients

    @property
    def peak(self) -> int:
        """Returns the bytes at the fuller of both times."""
        return max(self.resident) + self.workspace

    def add(self, other: Cost) -> None:
        """Adds the cost of other layers. Their workspaces are not in use at the same time."""
        self.compute_seconds += other.compute_seconds
        self.communication_seconds += other.communication_seconds
        self.flops += other.flops
        self.weights += other.weights
        self.moments += other.moments
        self.saved += other.saved
        self.recomputed += other.recomputed
        self.gradients += other.gradients
        self.stacked_gradients += other.stacked_gradients
        self.workspace = max(self.workspace, other.workspace)
        self.calls += other.calls

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes of all calls in a step, by kind of collective."""
        total: collections.Counter[str] = collections.Counter()
        for call, _, times in self.calls:
            total[call.kind] += call.bytes * times
        return dict(total)
