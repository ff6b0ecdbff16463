"""Checks that a runtime keeps arrays in host memory where a trainer's Params ask for it."""

from __future__ import annotations

from lingvo_gshard.core import UserError, remat_policy
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.training.step.trainer import Trainer


def offload_settings(trainer: Trainer) -> list[str]:
    """Returns the Params that keep arrays in host memory, such as `step.offload_moments = True`."""
    found = [setting for part in trainer.step_parts for setting in part.host_settings]
    for layer in trainer.task.all_layers():
        if isinstance(layer, Execution) and remat_policy.is_offloaded(layer.p.rematerialize):
            found.append(f"{layer.path}.rematerialize = {layer.p.rematerialize!r}")
    return found


def refuse(trainer: Trainer, runtime: str) -> None:
    """Refuses to run a trainer whose Params ask for host memory.

    Args:
      runtime: the value of `runtime` that compiles without host memory.

    Raises:
      UserError: there are settings; names the first.
    """
    if settings := offload_settings(trainer):
        raise UserError(
            f"{settings[0]} needs `runtime=spmd`: with `runtime={runtime}` TensorFlow compiles the "
            "step, and it has no arrays in host memory"
        )


def notes(trainer: Trainer, platform: str) -> list[str]:
    """Returns a sentence if host memory is simulated on a platform, which has jax's name."""
    settings = offload_settings(trainer)
    if platform != "cpu" or not settings:
        return []
    return [
        f"{settings[0]} is simulated: the memory of a CPU is that of its host, so that nothing "
        "moves and no memory is saved"
    ]
