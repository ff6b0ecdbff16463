"""What a step costs a device: seconds and bytes, and how they are added up."""

from __future__ import annotations

import collections
import dataclasses

from lingvo_gshard.planning.search.layouts import Call

FORWARD, BACKWARD, REMATERIALizED, OPTIMIZER = "forward", "backward", "rematerialized", "optimizer"


@dataclasses.dataclass
class Cost:
    """Of one device in one step, in seconds and bytes.

    kept: activations between the passes. again: what one unit computes again. gradients: of all
    weights; stacked_gradients: those of loops among them, whose memory is taken when the backward
    pass begins. working: tensors and gradients of the largest product. calls: collectives, each
    with its phase and how often a step has it.
    """

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    flops: int = 0
    weights: int = 0
    moments: int = 0
    kept: int = 0
    again: int = 0
    gradients: int = 0
    stacked_gradients: int = 0
    working: int = 0
    calls: list[tuple[Call, str, int]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All of it, one after another."""
        return self.compute_seconds + self.communication_seconds

    @property
    def held(self) -> tuple[int, int]:
        """Bytes, but for `working`, when the backward pass begins and when it ends."""
        state = self.weights + self.moments + self.again
        return state + self.kept + self.stacked_gradients, state + self.gradients

    @property
    def peak(self) -> int:
        """Bytes at the worst of both moments."""
        return max(self.held) + self.working

    def add(self, other: Cost) -> None:
        """Adds the cost of other layers; those work at another time."""
        self.compute_seconds += other.compute_seconds
        self.communication_seconds += other.communication_seconds
        self.flops += other.flops
        self.weights += other.weights
        self.moments += other.moments
        self.kept += other.kept
        self.again += other.again
        self.gradients += other.gradients
        self.stacked_gradients += other.stacked_gradients
        self.working = max(self.working, other.working)
        self.calls += other.calls

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns kind of collective -> bytes of all its calls in a step."""
        found: collections.Counter[str] = collections.Counter()
        for call, _, times in self.calls:
            found[call.kind] += call.bytes * times
        return dict(found)
