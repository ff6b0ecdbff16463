"""The first weights of a new run, taken from another run, such as an imported one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import msgspec
import numpy as np

from lingvo_gshard.core import NestedMap, Params, UserError, explained, params_text, tf
from lingvo_gshard.tasks import LanguageModelTask, TranslationTask
from lingvo_gshard.training import BEST, Arrays, Checkpoint, CheckpointStore, Logdir, Trainer
from lingvo_gshard.wings.fine_tuning.adapters import is_factor
from lingvo_gshard.wings.fine_tuning.preferences import REFERENCE

PART = "theta"


class FirstWeights(Protocol):
    """Gives the first weights of a new run, such as `StartingPoint` and `PublishedStart`."""

    @property
    def extras(self) -> pathlib.Path:
        """A directory with vocabularies."""
        ...

    def checkpoint(self, trainer: Trainer, abstract_state: NestedMap | None) -> Checkpoint:
        """Returns a checkpoint of step 0 with the weights.

        Args:
          abstract_state: the state of its runtime. Each process reads its own shards.

        Raises:
          UserError: the weights do not fit the model of the new run, or cannot be read.
        """
        ...


class StartingPoint:
    """The best checkpoint of a run, whose weights and vocabularies another run starts with.

    It is the newest if the run keeps no best one.
    """

    def __init__(self, directory: str | os.PathLike, task: type, say: Callable[[str], None]):
        """Finds the checkpoint of a run; UserError if there is none, or one of another task."""
        self._directory = os.fspath(directory)
        logdir = Logdir(directory)
        if not logdir.has_checkpoints():
            raise UserError(
                f"`init_from={self._directory}` holds neither a checkpoint of a run nor a "
                "published model with its config.json"
            )
        self._store = CheckpointStore(logdir.checkpoints, say=say, writable=False, choice=BEST)
        first = self._store.peek()
        assert first is not None
        self._first: Checkpoint = first
        line = next(each for each in first.params_text.splitlines() if each.startswith("task.cls "))
        trained: type = params_text.experiment_from_text(line).task.cls
        kinds = (LanguageModelTask, TranslationTask)
        if any(issubclass(trained, kind) != issubclass(task, kind) for kind in kinds):
            raise UserError(
                f"`init_from={self._directory}` is a run of {trained.__name__}, and the new run is "
                f"of {task.__name__}. Start from a run or a published model of the same task"
            )
        self._say = say

    @property
    def extras(self) -> pathlib.Path:
        """The directory with the run's vocabularies."""
        return self._first.extras

    def checkpoint(self, trainer: Trainer, abstract_state: NestedMap | None) -> Checkpoint:
        """Returns a checkpoint of step 0 with the run's weights; see `FirstWeights`.

        Factors of adapters that the run has not get their initial values. The reference of
        preferences gets a copy of the weights.
        """
        stored = self._first.record.digests[PART]
        specs = dict(trainer.theta_specs.flatten_items())
        factors = {path for path in specs if is_factor(path)}
        learns_preferences = any(path.startswith(_REFERENCE) for path in specs) or (
            "preferences" in trainer.task.p and trainer.task.p.preferences.beta
        )
        if learns_preferences and factors & set(stored):
            raise UserError(
                f"`init_from={self._directory}` has adapters, and the reference of preferences is "
                "the model without adapters. Merge them first: gshard-export "
                "--format=huggingface writes a model that a run can start from"
            )
        new = {path for path in specs if path.startswith(_REFERENCE)} | (factors - set(stored))
        wanted = None
        if abstract_state is not None:
            items = abstract_state[PART].flatten_items()
            wanted = NestedMap({PART: NestedMap({k: v for k, v in items if k not in new})})
        found = self._store.restore(wanted, parts=(PART,))
        assert found is not None
        self._say(f"Starting from the weights of step {found.step:,} of {self._directory}")
        # The reference of an earlier training on preferences is not what this one begins with.
        theta = {k: v for k, v in found.theta.items() if not k.startswith(_REFERENCE)}
        theta |= initial_factors(trainer, stored) | references(specs, theta)
        record = msgspec.structs.replace(found.record, step=0, position=None)
        return dataclasses.replace(found, record=record, arrays={PART: theta})


def initial_factors(trainer: Trainer, stored: Collection[str]) -> Arrays:
    """Returns the initial factors of adapters that are not stored, by path."""
    key = tf.constant([trainer.p.seed & 0x7FFFFFFF, 0], tf.int32)
    return {
        path: np.asarray(spec.init(key))
        for path, spec in trainer.theta_specs.flatten_items()
        if is_factor(path) and path not in stored
    }


_REFERENCE = f"{REFERENCE}."


def references(paths: Iterable[str], arrays: Arrays) -> Arrays:
    """Returns the weights of the reference of preferences: copies of the model's."""
    wanted = [path for path in paths if path.startswith(_REFERENCE)]
    return {path: arrays[path.removeprefix(_REFERENCE)].copy() for path in wanted}


def params_of(directory: str | os.PathLike) -> Params:
    """Returns the Params of the run to start from. Raises ValueError if there is no such run."""
    with explained(f"`init_from={os.fspath(directory)}`", UserError):
        return Logdir(directory).read_params()
