"""GivenLoads: the loads that a plan is asked to take, checked against the planned model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.loads import checks, file
from lingvo_gshard.planning.loads.file import FLAG, Loads
from lingvo_gshard.planning.loads.layers import ExpertLayer, expert_layers
from lingvo_gshard.planning.loads.rating import rate
from lingvo_gshard.planning.loads.record import RouterLoads
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.progress import Progress
from lingvo_gshard.runtime.program.step_programs import BatchSpecs
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.monitoring.routers.counts import watched_layers
from lingvo_gshard.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class LoadsOptions:
    """Which loads a plan takes. Without a file it takes even loads only.

    Attributes:
      path: file with the loads of routers, as `file.load` reads it.
      first_step: leaves out the steps of the file before this one.
      replicas: further copies of experts that the placement has in each layer.
    """

    path: str | None = None
    first_step: int = 0
    replicas: int = 0

    def check(self) -> None:
        """Raises ValueError if an option is negative or applies to a file that is not given."""
        for flag, value in (("loads_from", self.first_step), ("replicas", self.replicas)):
            if value < 0:
                raise UserError(f"--{flag}={value}: expected 0 or more")
            if value and self.path is None:
                raise UserError(f"--{flag}={value} applies to {FLAG}, which is not given")

    def read(self) -> Loads | None:
        """Returns the loads in the file; None without a file. ValueError for a wrong one."""
        self.check()
        return None if self.path is None else file.load(self.path, self.first_step)


@dataclasses.dataclass(frozen=True)
class GivenLoads:
    """Loads with the layers with experts that they are of.

    Attributes:
      loads: the loads.
      layers: the layers of the planned step.
      replicas: further copies of experts that the placement has in each layer.
    """

    loads: Loads
    layers: Sequence[ExpertLayer]
    replicas: int

    @classmethod
    def of(
        cls,
        loads: Loads,
        replicas: int,
        trainer: Trainer,
        batch: BatchSpecs,
        partitioning: Partitioning,
        name: str,
        progress: Progress,
    ) -> GivenLoads:
        """Returns the loads with the layers of a trainer's step.

        Args:
          loads: the loads.
          replicas: further copies of experts that the placement has in each layer.
          trainer: the trainer.
          batch: shape and dtype of each array of a batch.
          partitioning: mesh and strategy of the step.
          name: name of the experiment.
          progress: called when tracing begins.

        Raises:
          UserError: the loads are of another model, or there is no room for the replicas.
        """
        checks.check_model(loads, watched_layers(trainer.task), name)
        progress("reading the loads")
        layers = expert_layers(trainer, batch, partitioning)
        checks.check_replicas(replicas, layers)
        return cls(loads, layers, replicas)

    def rate(self, plan: Plan) -> RouterLoads:
        """Returns what a planned step takes under the loads."""
        return rate(plan, self.layers, self.loads, self.replicas)
