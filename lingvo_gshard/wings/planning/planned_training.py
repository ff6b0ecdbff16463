"""PlannedTraining: the training that a file of gshard-plan describes, read and checked."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from lingvo_gshard.core import (
    Device,
    Params,
    UserError,
    atomic,
    explained,
    jax,
    objects,
    params_text,
)
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.planning.machines import chips, topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan import plan as plans
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.search import record as searches
from lingvo_gshard.wings.planning.search.record import SearchRecord

# The environment variable that says that a user wants virtual devices.
_PLATFORMS = "JAX_PLATFORMS"


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """The training that a file describes.

    Attributes:
      params: its Params, with all that was planned: mesh, strategy and options of the compiler are
        in `sharding`.
      plan: the plan of the step; None if a search compiled nothing.
    """

    path: str
    name: str
    params: Params
    topology: Topology
    plan: Plan | None

    def __str__(self) -> str:
        """Returns the file, as options and flags name the plan."""
        return self.path

    @property
    def devices(self) -> int:
        """The number of devices that were planned."""
        return self.topology.devices

    def check_devices(self, devices: list[Device]) -> None:
        """Raises UserError if a training for accelerators would get virtual devices of a CPU.

        A user who asks for CPUs in JAX_PLATFORMS tries the training on virtual devices.
        """
        planned = self.topology
        is_asked_for = "cpu" in os.environ.get(_PLATFORMS, "")
        if planned.kind == "cpu" or devices[0].platform != "cpu" or is_asked_for:
            return
        here = jax.devices()
        what = f"{len(here)} ({here[0].device_kind})" if here[0].platform != "cpu" else "none"
        raise UserError(
            f"`plan={self.path}` is for {planned.devices:,} devices of {planned.name}, "
            f"but there are {what}. Plan again for the machine that you have, or set "
            f"{_PLATFORMS}=cpu in the environment to try the plan on virtual devices"
        )

    def note(self, device: Device) -> str:
        """Returns a warning if the training runs on other chips than planned, else ""."""
        found = chips.of_device(device.platform, device.device_kind)
        if found is not None and found.key == self.topology.chip.key:
            return ""
        if found is None and self.topology.kind == device.platform:
            return ""
        return (
            f"Warning: planned for {self.topology.chip.name}, but these devices are "
            f"{device.device_kind}: memory and time will differ"
        )


class _Header(msgspec.Struct):
    """Versions, which are read first: other fields depend on them. A file has one of the two."""

    format: int | None = None
    search_format: int | None = None


def load(path: str | os.PathLike) -> PlannedTraining:
    """Returns the training that a file describes, which gshard-plan --json has written.

    Raises:
      UserError: names `plan` and the reason: a file that is missing, damaged, or of another kind or
        version; no training step, or no candidate that fits; another number of devices in the mesh
        than in the machine.
    """
    shown = os.fspath(path)
    try:
        name, topology, params, plan = _read(shown)
        return _checked(PlannedTraining(shown, name, params, topologies.get(topology), plan))
    except UserError as error:
        reason = str(error).removeprefix(f"{shown}: ")
        raise UserError(f"`plan={shown}`: {reason}") from error


def _read(path: str) -> tuple[str, str, Params, Plan | None]:
    """Returns name, topology, Params and plan of a file."""
    with plans.reading(path, "neither a plan nor a search"):
        text = objects.read_bytes(path)
        header = atomic.decode(text, _Header)
        if header.search_format is not None:
            found = _search(text, header.search_format)
            return found.name, found.topology, _params(found.params), found.plan
        if header.format is None:
            raise UserError("neither a plan nor a search; gshard-plan --json writes both")
    with plans.reading(path, "not a plan"):
        plan = plans.decode(text, path)
    if not plan.params:
        raise UserError(
            f"has no Params to train: it is a plan of {plan.name} that is no experiment, or one of "
            "an earlier version. Plan an experiment with this version"
        )
    return plan.name, plan.topology, _params(plan.params), plan


def _search(text: bytes, version: int) -> SearchRecord:
    """Returns the search in a file that has a candidate that fits."""
    if version != searches.FORMAT:
        raise UserError(
            f"search format {version}, but this version reads format {searches.FORMAT}. Search "
            "again with this version"
        )
    found = atomic.decode(text, SearchRecord)
    if found.best is None:
        raise UserError(
            f"no candidate of the search fits {found.topology}. Search with more devices or a "
            "smaller batch"
        )
    return found


def _params(text: str) -> Params:
    with explained("its Params cannot be read", ValueError):
        return params_text.experiment_from_text(text)


def _checked(found: PlannedTraining) -> PlannedTraining:
    """Returns a training if its parts agree; UserError if they do not."""
    mesh = Mesh.parse(found.params.sharding.mesh)
    if mesh.size != found.topology.devices:
        raise UserError(
            f"its mesh {mesh} has {mesh.size:,} devices, but {found.topology.name} has "
            f"{found.topology.devices:,}. Plan again"
        )
    if found.params.name != found.name:
        raise UserError(
            f"a plan of {found.name} with the Params of {found.params.name}. Plan again"
        )
    return found
