"""Candidates of a search: a mesh, sharding tables, and hyperparameters of the training step."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec

from lingvo_gshard.core import Params, remat_policy
from lingvo_gshard.layers import EinsumDispatch, GatherDispatch, Sequential
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.gin.binding import gin_name
from lingvo_gshard.wings.planning.plan.plan import Record
from lingvo_gshard.wings.repeat.loop import Repeat

# These compute the same function, so a search may replace one by the other.
DISPATCHES = (GatherDispatch, EinsumDispatch)
_MICRO_BATCHES, _PRECISION = "step.micro_batches", "step.precision"
_OFFLOAD_MOMENTS, _INTERLEAVED = "step.offload_moments", "interleaved"


@dataclasses.dataclass(frozen=True)
class ChoicePaths:
    """The paths of an experiment's hyperparameters that a candidate's choices set.

    Attributes:
      dispatch: the dispatches that a search may replace.
      compile_options: changes to the compiler's options that all candidates have.
      offloads_moments: whether the experiment itself keeps optimizer moments on the host.
      interleaved: the numbers of interleaved parts of a batch.
      dropless: the dispatches without capacity, whose exchange a search may choose.
    """

    rematerialize: tuple[str, ...] = ()
    dispatch: tuple[str, ...] = ()
    compile_options: tuple[str, ...] = ()
    offloads_moments: bool = False
    interleaved: tuple[str, ...] = ()
    dropless: tuple[str, ...] = ()

    @classmethod
    def of(cls, experiment: Params) -> ChoicePaths:
        """Returns the paths of an experiment."""
        dispatches = [path for path, node in experiment.nodes() if node.cls in DISPATCHES]
        interleaved = [
            f"{path}.{_INTERLEAVED}"
            for path, node in experiment.nodes()
            if node.cls in (Sequential, Repeat)
        ]
        policies = [
            path for path, _ in experiment.leaves() if path.rpartition(".")[2] == "rematerialize"
        ]
        return cls(
            tuple(policies),
            tuple(dispatches),
            experiment.sharding.compile_options,
            experiment.get(_OFFLOAD_MOMENTS),
            tuple(interleaved),
            tuple(path for path, node in experiment.nodes() if node.cls is DroplessDispatch),
        )


@dataclasses.dataclass(frozen=True)
class Saving:
    """A choice of the tensors that a step keeps for later, and of moments on the host."""

    policy: str = remat_policy.NONE
    offloads_moments: bool = False

    @property
    def on_device(self) -> Saving:
        """The saving that keeps the same tensors on the device."""
        return Saving(remat_policy.on_device(self.policy))


SAVE_ALL = Saving()


class Candidate(Record, frozen=True):
    """A way to run a training step.

    Attributes:
      strategy: sharding table, or name of a strategy.
      overrides: (pattern of layer paths, table) for layers that are sharded differently.
      micro_batches: number of micro-batches of a step; 0 keeps the experiment's.
      precision: types of weights and activations, as `step.precision`; "" keeps the experiment's.
      dispatch: name of one of `DISPATCHES`; "" keeps the experiment's.
      compile_options: further changes to the compiler's options.
      offload_moments: whether the optimizer's moments are kept in the memory of the host.
      interleaved: number of interleaved parts of a batch; 0 keeps the experiment's.
      exchange: name of the exchange of dropless dispatches; "" keeps the experiment's.
    """

    mesh: str
    strategy: str
    overrides: tuple[tuple[str, str], ...] = ()
    rematerialize: str = remat_policy.NONE
    micro_batches: int = 0
    precision: str = ""
    dispatch: str = ""
    compile_options: tuple[str, ...] = ()
    offload_moments: bool = False
    interleaved: int = 0
    exchange: str = ""

    def settings(self, paths: ChoicePaths = ChoicePaths()) -> list[str]:
        """Returns the settings that select the candidate: options, and Params as in a gin file."""
        settings = [f"mesh={self.mesh}", f"strategy={self.strategy}"]
        if self.compile_options:
            options = (*paths.compile_options, *self.compile_options)
            settings += [f"compile_options={each}" for each in options]
        if self.overrides:
            settings.append(f"sharding.overrides = {dict(self.overrides)!r}")
        values = self.values(paths).items()
        return settings + [f"{gin_name(path)} = {gin_value(value)}" for path, value in values]

    def params(self, experiment: Params, paths: ChoicePaths = ChoicePaths()) -> Params:
        """Returns a copy of an experiment's Params with all choices of the candidate."""
        changed = experiment.copy()
        changed.sharding.set(mesh=self.mesh, strategy=self.strategy, overrides=dict(self.overrides))
        changed.sharding.compile_options = (*paths.compile_options, *self.compile_options)
        for path, value in self.values(paths).items():
            changed.set_path(path, value.params() if isinstance(value, type) else value)
        return changed

    def values(self, paths: ChoicePaths) -> dict[str, Any]:
        """Returns the values of hyperparameters, by path; a class stands for its Params."""
        values: dict[str, Any] = dict.fromkeys(paths.rematerialize, self.rematerialize)
        if self.micro_batches:
            values[_MICRO_BATCHES] = self.micro_batches
        if self.precision:
            values[_PRECISION] = self.precision
        if self.offload_moments != paths.offloads_moments:
            values[_OFFLOAD_MOMENTS] = self.offload_moments
        if self.interleaved:
            values |= dict.fromkeys(paths.interleaved, self.interleaved)
        if self.exchange:
            values |= {f"{path}.exchange": self.exchange for path in paths.dropless}
        if self.dispatch:
            (dispatch,) = (cls for cls in DISPATCHES if cls.__name__ == self.dispatch)
            values |= dict.fromkeys(paths.dispatch, dispatch)
        return values


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of a candidate that only a compilation can rate. Empty fields change nothing."""

    dispatch: str = ""
    compile_options: tuple[str, ...] = ()
    interleaved: int = 0

    def __str__(self) -> str:
        options = [f"`compile_options={each}`" for each in self.compile_options]
        parts = [f"{self.interleaved} interleaved parts"] if self.interleaved else []
        return " ".join([self.dispatch, *parts, *options]).strip()

    def applied(self, candidate: Candidate) -> Candidate:
        """Returns a candidate with this change."""
        return msgspec.structs.replace(
            candidate,
            dispatch=self.dispatch or candidate.dispatch,
            compile_options=(*candidate.compile_options, *self.compile_options),
            interleaved=self.interleaved or candidate.interleaved,
        )


def gin_value(value: Any) -> str:
    """Returns a value as gin writes it."""
    if isinstance(value, type):
        return f"@{value.__module__}.{value.__qualname__}"
    return repr(value) if isinstance(value, bool) else json.dumps(value)
