"""Useful floating-point operations of a training step."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.runtime import USEFUL_FLOPS
from lingvo_gshard.tasks import BatchSpecs, Task
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters

# The gradient of a matrix product is two products of the same size.
FORWARD_AND_BACKWARD = 3


@USEFUL_FLOPS.register("layers")
def step_flops(task: Task, batch: BatchSpecs) -> int:
    """Returns the useful operations of a training step on a batch.

    With adapters, the gradients of the frozen weights do not count: they are not needed.
    """
    shape = task.token_shape(batch)
    whole = FORWARD_AND_BACKWARD * flops(task, shape)
    if not task.p.lora.rank:
        return whole
    with_weights = flops(task, dataclasses.replace(shape, has_pairs=False))
    task.variable_specs()
    factors = active_parameters(task) - active_parameters(task.plain)
    return whole - with_weights + FORWARD_AND_BACKWARD * 2 * shape.tokens * factors
