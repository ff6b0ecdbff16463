"""Checkpoints of a Keras model on a mesh, which training resumes from bit for bit."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lingvo_gshard.core import UserError
from lingvo_gshard.core.lazy import jax, ocp
from lingvo_gshard.keras.mesh_state import MeshState
from lingvo_gshard.keras.mesh_steps import MeshSteps
from lingvo_gshard.keras.model_state import OPTIMIZER

# Items of a checkpoint.
_STATE, _POSITION = "state", "position"


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder of a training's checkpoints, and how often it saves.

    A checkpoint has all variables: weights, what the optimizer keeps, seeds, and metrics. Each
    process writes the parts that its devices hold. Training resumes under any mesh and layout. The
    order of the batches is the dataset's: to resume within an epoch, an epoch must always have the
    same batches in the same order.

    Attributes:
      directory: the folder of the checkpoints, created if it is new.
      every_steps: steps between checkpoints within an epoch; 0: only at the end of epochs.
      keep: number of the newest checkpoints that stay.
    """

    directory: str | os.PathLike
    every_steps: int = 0
    keep: int = 2

    def __post_init__(self):
        for name, least in (("every_steps", 0), ("keep", 1)):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"`checkpoints.{name}={value}`; expected {least} or more")


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The position that training resumes from.

    Attributes:
      epoch: the epoch, from 0.
      batch: number of batches of this epoch that were trained on.
      step: number of steps taken in all.
      scalars: numbers of the optimizer by name, such as the learning rate. Callbacks may read them
        before the first step, when the other variables are restored.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Saver:
    """Saves the state of steps while they run, and restores it before the first one."""

    def __init__(self, options: Checkpoints, steps: MeshSteps):
        """Opens the folder."""
        self._options, self._steps = options, steps
        self._epoch, self._saved = 0, -1
        self._resumed = Resumed()
        directory = pathlib.Path(options.directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=options.keep),
            item_names=(_STATE, _POSITION),
        )

    def resume(self) -> Resumed:
        """Returns where training goes on, and has the state restored before the first step."""
        step = self._manager.latest_step()
        if step is None:
            return Resumed()
        arguments = ocp.args.Composite(**{_POSITION: ocp.args.JsonRestore()})
        found = Resumed(**self._manager.restore(step, args=arguments)[_POSITION])
        self._steps.steps = self._saved = found.step
        self._steps.skip(found.batch)
        self._resumed = found
        self._steps.at_start(lambda state: self._restore(step, state))
        return found

    def begin(self, optimizer: Any) -> None:
        """Sets the numbers of the optimizer before callbacks read them."""
        scalars = self._resumed.scalars
        for variable in optimizer.variables if optimizer else ():
            # Keras's shapes of rank 0 are true.
            if variable.name in scalars and len(variable.shape) == 0:
                variable.assign(scalars[variable.name])

    def check_restored(self) -> None:
        """Raises UserError if there is a checkpoint, but the data had no batch to restore it for.

        A model's variables are made for the shapes of a batch.
        """
        if self._resumed.step and self._steps.state is None:
            raise UserError(
                f"`checkpoints`: step {self._resumed.step} in {self._options.directory} is not "
                "restored, because `x` has no batch"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Takes note of the epoch that begins."""
        self._epoch = epoch

    def end_batch(self, batches: int) -> None:
        """Saves if it is time, after so many `batches` of the epoch."""
        every = self._options.every_steps
        if every and self._steps.steps % every == 0 and self._steps.steps != self._saved:
            self._save(self._epoch, batches)

    def end_epoch(self) -> None:
        """Saves after an epoch."""
        self._save(self._epoch + 1, 0)

    def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _save(self, epoch: int, batches: int) -> None:
        state = self._steps.state
        if state is None:
            return
        # Callbacks may have set variables at the end of the epoch.
        state.push_changes()
        paths = list(state.arrays)
        arrays = dict(zip(_keys(paths), state.values(paths), strict=True))
        position = Resumed(epoch, batches, self._steps.steps, state.scalars(OPTIMIZER))
        if position.step == self._saved:
            # The last step of an epoch may have been saved as one within the epoch.
            self._manager.wait_until_finished()
            self._manager.delete(position.step)
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.PyTreeSave(arrays),
                    _POSITION: ocp.args.JsonSave(dataclasses.asdict(position)),
                }
            ),
        )
        # The next step donates the memory that is being written.
        self._manager.wait_until_finished()
        self._saved = position.step

    def _restore(self, step: int, state: MeshState) -> None:
        keys = dict(zip(_keys(state.arrays), state.arrays, strict=True))
        saved = self._saved_keys(step, keys, state)
        wanted = {
            found: ocp.ArrayRestoreArgs(
                sharding=state.sharding(keys[key]), dtype=state.arrays[keys[key]].struct.dtype
            )
            for key, found in saved.items()
        }
        with jax.enable_x64(True):
            restore = ocp.args.PyTreeRestore(restore_args=wanted)
            found = self._manager.restore(step, args=ocp.args.Composite(**{_STATE: restore}))
        kept = state.set_by_callbacks(OPTIMIZER, self._resumed.scalars)
        state.restore({keys[key]: found[_STATE][name] for key, name in saved.items()})
        if not self._resumed.batch:
            # An epoch begins: callbacks have set the learning rate, and metrics are of the epoch
            # before. Within an epoch both are part of the checkpoint.
            state.assign(kept)
            self._steps.reset_metrics()

    def _saved_keys(self, step: int, keys: Mapping[str, str], state: MeshState) -> dict[str, str]:
        """Returns the key in a checkpoint of each key of the model."""
        with ocp.PyTreeCheckpointer() as reader:
            where = pathlib.Path(self._options.directory).absolute() / str(step) / _STATE
            saved: dict[str, Any] = dict(reader.metadata(where).item_metadata)
        by_name = {_without_numbers(key): key for key in saved}
        place = f"`checkpoints`: step {step} in {self._options.directory}"
        found = {}
        for key, path in keys.items():
            name = by_name.get(_without_numbers(key))
            if name is None:
                raise UserError(
                    f"{place} has no variable {path} at this place of the model. Was it saved by "
                    "another model?"
                )
            shape, its = list(state.arrays[path].shape), list(saved[name].shape)
            if shape != its:
                raise UserError(f"{place}: {path} has the shape {its}, but the model's has {shape}")
            found[key] = name
        return found


def _keys(paths: Iterable[str]) -> list[str]:
    """Returns the names of arrays in a checkpoint: their place in the model, and their path."""
    return [f"{index:05d}.{path}" for index, path in enumerate(paths)]


def _without_numbers(key: str) -> str:
    """Returns a key without the numbers that Keras gives to layers: `dense` for `dense_1`.

    A process that makes a model twice gives the layers of the second one other numbers.
    """
    place, _, path = key.partition(".")
    return f"{place}.{re.sub(r'_[0-9]+(?=/|_|$)', '', path)}"
