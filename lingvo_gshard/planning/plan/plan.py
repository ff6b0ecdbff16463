"""Plan: what a step needs, does and costs on a machine; as data, the same for every report."""

from __future__ import annotations

import dataclasses
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled step, put against the figures of the machine that it was compiled for.

    bytes_per_device: weights, moments, activations (and all other temporaries), inputs, program,
        their peak, and the capacity of the device.
    parameters: total, and active: those that one token uses. tensors: weights and moments, with
    layout, split and bytes. largest_temporaries: not all alive at
        once. collectives: bytes of one call on one device, seconds of all `count` calls.
    flops: of one device and step: executed by its matrix products; of those useful (for a program
        other than a training step: all that are not computed again nor dispatch), computed again,
        moving tokens to experts and back, and padding, the rest.
    layers: bounds and estimate of each layer's operations, in the order of their first.
    seconds_per_step, steps_per_second, tokens_per_second and mfu are the estimate; None are the
        latter of a program that does nothing.
    tokens_per_step: the target positions of a batch; None where that means nothing.
    remedies: what was tried where it did not fit.
    """

    name: str
    topology: str
    chip: str
    devices: int
    compiler: str
    mesh: str
    strategy: str
    strategy_name: str
    partitioner: str
    fits: bool
    bytes_per_device: Row
    parameters: Row
    tensors: list[Row]
    largest_temporaries: list[Row]
    collectives: list[Row]
    flops: Row
    layers: list[Row]
    seconds_per_step: float
    seconds_per_step_bound: float
    steps_per_second: float | None
    steps_per_second_bound: float | None
    tokens_per_step: int | None
    tokens_per_second: float | None
    mfu: float | None
    budget: Row | None
    remedies: list[Row]
    compile_seconds: float
    versions: dict[str, str]
    notes: list[str]

    def to_json(self) -> Row:
        """Returns it as json.dump takes it; planning/plan/file.py reads it back."""
        from lingvo_gshard.planning.plan.file import FORMAT

        return {"format": FORMAT, **dataclasses.asdict(self)}
