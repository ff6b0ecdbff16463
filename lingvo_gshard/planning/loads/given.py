"""Loads that a plan is asked to take, checked against the planned model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.options import Options, option
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.planning.loads import file
from lingvo_gshard.planning.loads.file import Loads, RouterLoads
from lingvo_gshard.planning.loads.layers import ExpertLayer, expert_layers
from lingvo_gshard.planning.loads.rating import rate
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.runtime.program.step_programs import BatchSpecs
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.run.routers.counts import watched_layers
from lingvo_gshard.training.run.routers.router_records import RouterRecord
from lingvo_gshard.training.step.trainer import Trainer


def check_model(loads: Loads, layers: Mapping[str, MixtureOfExperts], name: str) -> None:
    """Raises ValueError that names the layer and the counts if loads are of another model.

    Args:
      loads: the loads.
      layers: the layers with experts of the planned model by path.
      name: name of the planned experiment.
    """
    where = f"`loads={loads.path}`"
    if not layers:
        raise UserError(f"{where}: {name} has no layer with experts")
    counts = (
        f"{name} has {_count(len(layers), 'layer')} with experts, the file {len(loads.layers)}: "
        "are they of another model?"
    )
    for path in loads.layers:
        if path not in layers:
            raise UserError(
                f"{where} has loads of {path}, which is no layer with experts of {name}. "
                f"{names.nearest(path, layers)} {counts}"
            )
    for path, layer in layers.items():
        if path not in loads.layers:
            raise UserError(f"{where} has no loads of {path}. {counts}")
        _check_layer(where, loads.layers[path][0], layer, name)


def check_replicas(replicas: int, layers: Sequence[ExpertLayer]) -> None:
    """Raises ValueError if an expert would have more copies than there are devices."""
    for layer in layers:
        parts, experts = layer.devices.parts, layer.num_experts
        if replicas > experts * (parts - 1):
            raise UserError(
                f"`replicas={replicas}`: the {experts:,} experts of {layer.path} are divided over "
                f"{_count(parts, 'device')}; expected at most {experts * (parts - 1):,}, which is "
                "every expert on every device"
            )


def _check_layer(where: str, record: RouterRecord, layer: MixtureOfExperts, name: str) -> None:
    experts = layer.p.num_experts
    if record.num_experts != experts:
        raise UserError(
            f"{where} has loads of {_count(record.num_experts, 'expert')} in {record.layer}, where "
            f"{name} has {experts}: expected the loads of the same model"
        )
    each = float(layer.router.experts_per_token(layer.router.p))
    if record.experts_per_token not in (0.0, each):
        raise UserError(
            f"{where} has loads of {record.experts_per_token:g} experts per token in "
            f"{record.layer} ({record.router}), where {name} has {each:g} "
            f"({type(layer.router).__name__}): expected the loads of the same router"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class LoadsOptions(Options):
    """Options for a plan's loads. Without a file it takes even loads only."""

    loads: str | None = option(
        None,
        "Loads that the routers of a run had, to plan with: a file of gshard-experts report --json "
        "or of gshard-experts watched --json, or the run's routers.jsonl. The plan then says which "
        "device is the slowest, what is dropped, and how to place experts.",
    )
    loads_from: int = option(
        0, "First step of `loads` to take; those before it are left out.", minimum=0
    )
    replicas: int = option(
        0,
        "Further copies of experts in each layer that the placement for `loads` has.",
        minimum=0,
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("loads_from", "replicas"):
            value = getattr(self, name)
            if value and self.loads is None:
                raise UserError(f"`{name}={value}` applies to `loads`, which is not given")

    def read(self) -> Loads | None:
        """Returns the loads in the file; None without a file. UserError for a wrong one."""
        return None if self.loads is None else file.load(self.loads, self.loads_from)


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
          progress: is told when tracing begins.

        Raises:
          UserError: the loads are of another model, or there is no room for the replicas.
        """
        check_model(loads, watched_layers(trainer.task), name)
        progress.begin("reading the loads")
        layers = expert_layers(trainer, batch, partitioning)
        check_replicas(replicas, layers)
        return cls(loads, layers, replicas)

    def rate(self, plan: Plan) -> RouterLoads:
        """Returns what a planned step takes under the loads."""
        return rate(plan, self.layers, self.loads, self.replicas)
