"""Turns the arrays of a checkpoint into the state of a trainer."""

from __future__ import annotations

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.parts import PART_NAMES
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.step.trainer import Trainer


def restored_state(
    trainer: Trainer, checkpoint: Checkpoint, abstract_state: NestedMap | None = None
) -> NestedMap:
    """Returns a checkpoint's arrays as a trainer's state.

    Parts that the checkpoint lacks get their initial values. These are averages and the loss scale
    if the trainer did not keep them when it saved, and the moments of a run with local updates,
    whose workers have moments of their own.

    Args:
      trainer: the trainer whose state it becomes.
      checkpoint: its arrays are those of the state's parts.
      abstract_state: the state of a runtime, which may have more parts than the trainer's.

    Raises:
      UserError: names the arrays that do not fit the trainer's specs.
    """
    specs = NestedMap({**(abstract_state or {}), **trainer.state_specs()})
    restored = {
        part: unflatten(specs[part], arrays, PART_NAMES.get(part, part))
        for part, arrays in checkpoint.arrays.items()
        if part in specs
    }
    state = trainer.initial_extras(restored["theta"])
    if "moments" not in restored:
        state.moments = specs.moments.transform(lambda spec: np.zeros(spec.shape, spec.dtype))
    state.update(restored, step=np.int32(checkpoint.step), stopped=np.bool_(False))
    return state


def restored_theta(trainer: Trainer, checkpoint: Checkpoint) -> NestedMap:
    """Returns the part of a checkpoint that `Runtime.load_theta` takes.

    Raises:
      UserError: names the arrays that do not fit the trainer's specs.
    """
    part = trainer.evaluated_part
    specs, arrays = trainer.state_specs()[part], checkpoint.arrays.get(part, {})
    return unflatten(specs, arrays, PART_NAMES[part])
