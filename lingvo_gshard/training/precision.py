"""Precision: of which type weights and activations are, by one name for a whole run.

Whatever the name, these are float32: routing, softmax and losses, the statistics of norms, sums of
gradients over micro-batches, and what optimizers compute and, unless told otherwise, keep.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.tasks.task import Task

_KNOB = "trainer.precision"
_DEFAULT = "float32"


@dataclasses.dataclass(frozen=True)
class Precision:
    """The types of one name.

    weights: in which they are kept between steps; bfloat16 ones are rounded at random after each.
    scales_loss: whether gradients may be too small for the type, so that the loss is scaled.
    """

    name: str
    activations: str
    weights: str = "float32"
    scales_loss: bool = False

    def typed(self, task: Params) -> Params:
        """Returns a task's Params with these types.

        Raises ValueError, naming both Params, where the task's say otherwise, and where its
        activations are of no type that can be chosen.
        """
        task = task.copy()
        for name, dtype in self._types(task.cls):
            if task.get(name) not in ("", dtype):
                raise self._contradiction(name, task.get(name), dtype, "leave it empty")
            task.set(**{name: dtype})
        return task

    def check(self, task: Task) -> None:
        """Raises ValueError, naming both Params, if a task was made with other types."""
        for name, dtype in self._types(type(task)):
            found = task.p.get(name) or _DEFAULT
            if found != dtype:
                raise self._contradiction(name, found, dtype, "make the trainer of its Params")

    def _types(self, task: type[Task]) -> list[tuple[str, str]]:
        """The names of the task's Params that hold a type, with the types they shall hold."""
        if self.activations not in task.ACTIVATION_DTYPES:
            raise ValueError(
                f"{_KNOB}={self.name!r} computes activations in {self.activations}, but "
                f"{task.__name__} only in {', '.join(task.ACTIVATION_DTYPES)}"
            )
        return [("dtype", self.weights), ("fprop_dtype", self.activations)]

    def _contradiction(self, name: str, found: str, expected: str, advice: str) -> ValueError:
        return ValueError(
            f"task.{name} is {found!r}, and {_KNOB}={self.name!r} makes it {expected!r}; {advice}, "
            f"or choose another {_KNOB}"
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
    """Returns the precision of a name; ValueError, with the nearest one, if there is none."""
    if name not in PRECISIONS:
        raise ValueError(f"{_KNOB} is {name!r}. {names.nearest(name, list(PRECISIONS))}")
    return PRECISIONS[name]
