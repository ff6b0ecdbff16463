"""Precision: the types of weights and activations of a run, chosen by one name.

Some things are float32 with every precision: routing, softmax, losses, the statistics of norms,
sums of gradients over micro-batches, and the computations of optimizers. Moments are float32 unless
`moment_dtype` says otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tasks.task import Task

_PARAM = "step.precision"
_DEFAULT = "float32"


@dataclasses.dataclass(frozen=True)
class Precision:
    """The types that one name stands for.

    Attributes:
      name: the value of `step.precision`.
      activations: dtype of the activations.
      weights: dtype of the weights between steps. bfloat16 weights are rounded stochastically.
      scales_loss: whether to scale the loss, since gradients may be too small for the type.
    """

    name: str
    activations: str
    weights: str = "float32"
    scales_loss: bool = False

    def typed(self, task: Params) -> Params:
        """Returns a task's Params with these types.

        Raises:
          UserError: the task's Params ask for other types, or the task does not let the types of
            its activations be chosen.
        """
        task = task.copy()
        for name, dtype in self._types(cast(type[Task], task.cls)):
            if task.get(name) not in ("", dtype):
                raise self._contradiction(name, task.get(name), dtype, "Leave it empty")
            task.set(**{name: dtype})
        return task

    def check(self, task: Task) -> None:
        """Raises ValueError naming both Params if a task was made with other types."""
        for name, dtype in self._types(type(task)):
            found = task.p.get(name) or _DEFAULT
            if found != dtype:
                advice = "Make the trainer from the task's Params"
                raise self._contradiction(name, found, dtype, advice)

    def _types(self, task: type[Task]) -> list[tuple[str, str]]:
        """Returns (hyperparameter, dtype) for the task's Params that hold a type."""
        if self.activations not in task.ACTIVATION_DTYPES:
            raise UserError(
                f"{_PARAM}={self.name!r} computes activations in {self.activations}, but "
                f"{task.__name__} only in {', '.join(task.ACTIVATION_DTYPES)}"
            )
        return [("dtype", self.weights), ("fprop_dtype", self.activations)]

    def _contradiction(self, name: str, found: str, expected: str, advice: str) -> UserError:
        return UserError(
            f"task.{name} is {found!r}, but {_PARAM}={self.name!r} needs {expected!r}. {advice}, "
            f"or choose another {_PARAM}"
        )


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", "float32"),
        Precision("bfloat16", "bfloat16"),
        Precision("bfloat16_weights", "bfloat16", weights="bfloat16"),
        Precision("float16", "float16", scales_loss=True),
    )
}


def get(name: str) -> Precision:
    """Returns the precision of a name. Raises ValueError with the nearest name if unknown."""
    if name not in PRECISIONS:
        raise UserError(f"{_PARAM} is {name!r}. {names.nearest(name, list(PRECISIONS))}")
    return PRECISIONS[name]
