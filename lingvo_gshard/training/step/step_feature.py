"""StepFeature: options of a training step that a module of its own adds."""

from __future__ import annotations

from typing import ClassVar

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.seams import Seam
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.precision import Precision
from lingvo_gshard.training.step.state_part import StatePart


class StepFeature(Configurable):
    """A feature of the training step. Its Params are `step.<name>`, by the name that it registers.

    Class attributes:
      HELP: describes its Params.
    """

    HELP: ClassVar[str] = ""

    def precision(self, chosen: Precision) -> Precision:
        """Returns the precision of the step, by default the chosen one.

        Args:
          chosen: the precision that `step.precision` names.
        """
        return chosen

    def part(self, task: Task, step: Params) -> StatePart | None:
        """Returns what the feature keeps in the trainer's state; None if nothing.

        Args:
          task: the task that is trained.
          step: the Params of the trainer.
        """
        del task, step
        return None

    def check_device(
        self, precision: Precision, platform: str, name: str, capability: str = ""
    ) -> None:
        """Checks that devices compute a step in its precision.

        Args:
          precision: the precision.
          platform: jax's name of their platform.
          name: jax's name of such devices. They need not be in this machine.
          capability: the compute capability of a GPU, such as "9.0"; empty if it is not known.

        Raises:
          UserError: they do not.
        """

    def device_notes(
        self, precision: Precision, task: Task, platform: str, has_kernels: bool
    ) -> list[str]:
        """Returns sentences on what devices compute in another way than the Params say.

        Args:
          precision: the precision.
          task: the task that is trained.
          platform: jax's name of the devices' platform.
          has_kernels: whether the step uses the platform's kernels.
        """
        del precision, task, platform, has_kernels
        return []


# Features by the name of their Params.
STEP_FEATURES: Seam[type[StepFeature]] = Seam("step")
