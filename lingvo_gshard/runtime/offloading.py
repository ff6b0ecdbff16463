"""Checks that a runtime keeps arrays in host memory where a trainer's Params ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.step.trainer import Trainer


def refuse(settings: Sequence[str], runtime: str) -> None:
    """Refuses to run a trainer whose Params ask for host memory.

    Args:
      settings: `Trainer.offload_settings`.
      runtime: the value of `runtime` that compiles without host memory.

    Raises:
      UserError: there are settings; names the first.
    """
    if settings:
        raise UserError(
            f"{settings[0]} needs `runtime=spmd`: with `runtime={runtime}` TensorFlow compiles the "
            "step, and it has no arrays in host memory"
        )


def notes(trainer: Trainer, platform: str) -> list[str]:
    """Returns a sentence if host memory is simulated on a platform.

    Args:
      trainer: the trainer.
      platform: jax's name of the devices' platform.
    """
    settings = trainer.offload_settings
    if platform != "cpu" or not settings:
        return []
    return [
        f"{settings[0]} is simulated: the memory of a CPU is that of its host, so that nothing "
        "moves and no memory is saved"
    ]
