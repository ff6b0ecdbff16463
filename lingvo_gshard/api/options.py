"""Options of the public API. Each field is also a flag of the command lines, of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from lingvo_gshard.core import Device, Options, option
from lingvo_gshard.runtime import CompileOptions
from lingvo_gshard.sharding import PartitioningOptions
from lingvo_gshard.wings.cluster.member import ClusterOptions

RUNTIMES = ("local", "spmd", "tpu_strategy")


class PlannedDevices(Protocol):
    """A plan that knows its machine, such as `planning.planned_training.PlannedTraining`.

    Most commands have no plan, and do not wait for the planner's modules.
    """

    @property
    def devices(self) -> int:
        """The number of devices that were planned."""
        ...

    def check_devices(self, devices: list[Device]) -> None:
        """Raises UserError if these devices of the mesh are no replacement for the planned ones."""
        ...

    def note(self, device: Device) -> str:
        """Returns a warning if a device is of another kind than planned, else ""."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeOptions(CompileOptions, PartitioningOptions):
    """Options that decide where and how an experiment's steps run.

        >>> options = gshard.RuntimeOptions(mesh="data=4,model=2", strategy="expert_tensor")
        >>> options.given()
        {'mesh': 'data=4,model=2', 'strategy': 'expert_tensor'}

    Attributes:
      cluster: the processes that run together; `ClusterOptions()` detects them. None: this process
        alone.
      plan: a plan of the training, which checks the devices. None: any devices will do.
    """

    runtime: str | None = option(
        None,
        "Where steps run: local (one device), spmd (all devices of `mesh`, through XLA's SPMD "
        "partitioner) or tpu_strategy (all cores of `tpu`, through TensorFlow's TPU build). "
        "Default: spmd if `mesh`, a coordinator or sharding.mesh is given, else local.",
        choices=RUNTIMES,
    )
    tpu: str | None = option(
        None,
        "TPU of `runtime=tpu_strategy`: local on a TPU VM, else the name of a Cloud TPU or "
        "grpc://address:port.",
    )
    compilation_cache: str | None = option(
        None,
        "Directory that keeps compiled programs for later runs, and the weights that decoding "
        "reads; '' disables it. Default: lingvo_gshard in $XDG_CACHE_HOME or ~/.cache.",
    )
    max_replicated_mb: float | None = option(
        None,
        "Refuses to run if each device would hold more MiB of replicated tensors although the "
        "strategy splits them.",
        minimum=0,
    )
    cluster: ClusterOptions | None = None
    plan: PlannedDevices | None = None

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, including the cluster's options."""
        values = _differing(self)
        cluster = values.pop("cluster", None)
        return values | _differing(cluster) if cluster else values

    def override(self, **values: Any) -> RuntimeOptions:
        """Returns the options with those `values` that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions(Options):
    """Options of an evaluation on tasks of lm-evaluation-harness.

    Attributes:
      tasks: names of tasks or groups of tasks.
    """

    tasks: Sequence[str]
    tasks_folder: str = option("", "Directory with further tasks, as YAML files.")
    few_shot: int | None = option(
        None, "Examples before each question; by default as many as each task names.", minimum=0
    )
    limit: int | None = option(None, "Questions of each task; by default all.", minimum=1)
    chat_template: bool = option(False, "Writes questions with the model's chat template.")


def _differing(options: Any) -> dict[str, Any]:
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }
