"""Turns the arrays of a checkpoint into the state of a trainer."""

from __future__ import annotations

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.step.state_part import part_titles
from lingvo_gshard.training.step.trainer import Trainer


def restored_state(
    trainer: Trainer, checkpoint: Checkpoint, abstract_state: NestedMap | None = None
) -> NestedMap:
    """Returns a checkpoint's arrays as a trainer's state.

    Parts of the state that are missing from the checkpoint get their initial values. The averages
    and the loss scale are missing if the run that saved did not use them. The moments are missing
    after local updates, since each worker has moments of its own.

    Args:
      abstract_state: the state of a runtime, which may have more parts than the trainer's.

    Raises:
      UserError: names the arrays that do not fit the trainer's specs.
    """
    specs = NestedMap({**(abstract_state or {}), **trainer.state_specs()})
    restored = {
        part: unflatten(specs[part], arrays, part_titles().get(part, part))
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
    return unflatten(specs, arrays, part_titles()[part])
