"""Checkpoints: what a run needs to go on, written by Orbax in the background and never half.

A checkpoint `checkpoints/<step>/` holds an item for each part of the state that is made of arrays,
`theta`, `moments` and whatever else the trainer keeps (arrays by their dotted paths, the same on
disk however they were split over devices), and `run` (run.json: step, data position, versions and
the digest of every array; params.txt; extras/: files of the input such as its vocabularies).

Orbax counts jax devices when it starts. Set JAX_PLATFORMS=cpu where jax must not take the GPU.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

import lingvo_gshard
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training import local_updates, processes
from lingvo_gshard.training.checkpoint import arrays as checkpoint_arrays
from lingvo_gshard.training.checkpoint.arrays import Arrays, check_fit
from lingvo_gshard.training.checkpoint.orbax_errors import quiet_orbax, reason_of

Say = Callable[[str], None]
WriteExtras = Callable[[pathlib.Path], None]

# The parts of a state that `run` holds.
_IN_RUN = ("step", "stopped")
# Those that are items of their own.
IN_WORDS = {
    "theta": "weights",
    "moments": "optimizer moments",
    "averages": "averages of weights",
    "loss_scale": "loss scale",
    local_updates.WORKERS: "workers' own states",
    local_updates.OUTER: "outer optimizer's moments",
}

# A save of several processes fails if one of them has not written its part by then.
_SAVE_SECONDS = 1800


@dataclasses.dataclass
class Checkpoint:
    """A restored checkpoint: arrays by dotted path, the data position, and where its files are.

    arrays: of each part of the state that was restored.
    """

    step: int
    arrays: dict[str, Arrays]
    position: Any
    params_text: str
    versions: dict[str, str]
    digests: dict[str, dict[str, int]]
    extras: pathlib.Path

    @property
    def theta(self) -> Arrays:
        """The weights."""
        return self.arrays.get("theta", {})

    @property
    def moments(self) -> Arrays:
        """The optimizer's moments."""
        return self.arrays.get("moments", {})


class _RunHandler(ocp.CheckpointHandler):
    """Writes the `run` item, in the main process."""

    def save(self, directory, args: _RunSave) -> None:
        if not processes.is_main():
            return
        directory = pathlib.Path(directory)
        (directory / "run.json").write_text(json.dumps(args.record, indent=1), encoding="utf-8")
        (directory / "params.txt").write_text(args.params_text, encoding="utf-8")
        (directory / "extras").mkdir()
        if args.write_extras is not None:
            args.write_extras(directory / "extras")

    def restore(self, directory, args=None) -> None:
        raise NotImplementedError("The store reads this item itself.")


@ocp.args.register_with_handler(_RunHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _RunSave(ocp.args.CheckpointArgs):
    record: dict[str, Any]
    params_text: str
    write_extras: WriteExtras | None


class CheckpointStore:
    """The checkpoints of one run: saved asynchronously and atomically, the last `keep` of them.

    A save that fails is reported through `say` and loses nothing that was saved before. `writable`
    False reads only, and leaves every file as it is. Where several processes train together, each
    has a store of the same directory and makes the same calls; the main one reports.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep: int = 3,
        say: Say = print,
        writable: bool = True,
    ):
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self.say = say
        self._writable = writable
        self._saving: int | None = None
        quiet_orbax()
        self._manager = self._open()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return list(self._steps)

    def save(
        self,
        step: int,
        state: NestedMap,
        position: Any,
        params_text: str,
        write_extras: WriteExtras | None = None,
    ) -> None:
        """Starts to save; returns as soon as `state`'s arrays may be changed or donated.

        state: its parts hold NumPy arrays or jax.Arrays. Of the latter each process writes the
            shards it has.
        position: what the input's `get_state` gave after the last batch of `step`.
        write_extras: called with an empty directory inside the checkpoint.
        """
        self.finish()
        arrays = {
            item: dict(part.flatten_items()) for item, part in state.items() if item not in _IN_RUN
        }
        items = {item: checkpoint_arrays.save_arguments(arrays[item]) for item in arrays}
        self._saving = step
        try:
            self._check_room(arrays)
            digests = {item: checkpoint_arrays.digests(arrays[item]) for item in arrays}
            record = {
                "step": step,
                "position": position,
                "versions": versions(),
                "digests": digests,
            }
            run = _RunSave(record, params_text, write_extras)
            arguments = ocp.args.Composite(**items, run=run)
            processes.together(lambda: self._manager.save(step, args=arguments, force=True))
        except Exception as error:  # Orbax and TensorStore raise many types when a disk is full.
            self._failed(error)

    def finish(self) -> bool:
        """Waits for the save under way; True if there was none or it succeeded."""
        if self._saving is None:
            return True
        try:
            processes.together(self._manager.wait_until_finished)
        except Exception as error:
            self._failed(error)
            return False
        self._steps = [*self._steps, self._saving][-self._keep :]
        self._saving = None
        return True

    def poll(self) -> None:
        """Reports a save that has failed in the background, without waiting for one under way."""
        if self._saving is None:
            return
        if not any(processes.gather(self._manager.is_saving_in_progress())):
            self.finish()

    def peek(self) -> Checkpoint | None:
        """Returns the newest checkpoint whose record is readable, without its arrays.

        None if there is no checkpoint at all; ValueError if no record is readable.
        """
        for step in reversed(self._steps):
            try:
                return processes.together(lambda step=step: self._read_record(step))
            except Exception:  # To say so, and to set it aside, is left to `restore`.
                continue
        return _none_left(self._directory, self._steps)

    def restore(
        self, like: NestedMap | None = None, parts: Sequence[str] = ()
    ) -> Checkpoint | None:
        """Returns the newest readable checkpoint, or None if there is none at all.

        A damaged one is reported, set aside as `damaged-<step>` where the store is writable, and
        the one before is taken. Raises ValueError if all are damaged.

        like: its parts hold jax.ShapeDtypeStructs. Each array is placed as the sharding says, each
            process reading its own shards; without a sharding, and without `like`, it is NumPy's.
            ValueError if the checkpoint has other paths, shapes or types.
        parts: of the state, those to read; none: all that there are.
        """
        self.finish()
        steps = self.steps
        for step in reversed(steps):
            directory = self._directory / str(step)
            try:
                checkpoint = processes.together(lambda step=step: self._read_record(step))
                items = _parts_to_read(checkpoint, like, parts)
                found = processes.together(
                    lambda at=directory, items=items: {
                        item: checkpoint_arrays.describe(at / item) for item in items
                    }
                )
            except Exception as error:  # A damaged file shows itself in any way it likes.
                self._set_aside(step, error)
                continue
            shardings = {item: _shardings(item, found[item], like) for item in items}
            try:
                arrays = _read_arrays(directory, shardings, checkpoint.digests)
            except Exception as error:
                self._set_aside(step, error)
                continue
            return dataclasses.replace(checkpoint, arrays=arrays)
        return _none_left(self._directory, steps)

    def close(self) -> None:
        """Waits for the save under way and lets go of Orbax's threads."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._warn(f"the last checkpoint could not be saved ({reason_of(error)})")
        self._manager.close()

    def _open(self) -> ocp.CheckpointManager | None:
        if self._writable and processes.is_main():
            self._directory.mkdir(parents=True, exist_ok=True)
        self._steps = processes.from_main(_steps_in(self._directory))
        if not self._writable:
            return None
        several = processes.count() > 1
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.LatestN(self._keep),
            cleanup_tmp_directories=True,
            create=False,
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_SECONDS),
            # Where they are named, the processes wait for one another with a time limit.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(processes.count())) if several else None
            ),
        )
        return ocp.CheckpointManager(
            self._directory, options=options, item_names=(*IN_WORDS, "run")
        )

    def _check_room(self, arrays: dict[str, Arrays]) -> None:
        """Raises OSError if the disk has no room, rather than fill it for everyone else."""
        sizes = [checkpoint_arrays.bytes_to_write(arrays[item]) for item in arrays]
        needed = sum(processes.gather(sum(sizes))) + 2**20
        free = processes.from_main(shutil.disk_usage(self._directory).free)
        if free < needed:
            words = f"no space left: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free"
            raise OSError(errno.ENOSPC, words)

    def _read_record(self, step: int) -> Checkpoint:
        directory = self._directory / str(step) / "run"
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        return Checkpoint(
            step=record["step"],
            arrays={},
            position=record["position"],
            params_text=(directory / "params.txt").read_text(encoding="utf-8"),
            versions=record["versions"],
            digests=record["digests"],
            extras=directory / "extras",
        )

    def _failed(self, error: Exception) -> None:
        step, self._saving = self._saving, None
        self._manager.close()
        self._manager = self._open()
        last = (
            f"the last good one is step {self._steps[-1]}" if self._steps else "there is none yet"
        )
        self._warn(f"the checkpoint of step {step} could not be saved ({reason_of(error)}); {last}")

    def _set_aside(self, step: int, error: Exception) -> None:
        self._warn(f"the checkpoint of step {step} is damaged: {reason_of(error)}")
        self._steps.remove(step)
        if self._writable:
            processes.together(lambda: self._rename(step))
            self._manager.reload()

    def _rename(self, step: int) -> None:
        """Moves a damaged checkpoint out of the way, in the main process."""
        if not processes.is_main():
            return
        number, target = 0, self._directory.parent / f"damaged-{step}"
        while target.exists():
            number += 1
            target = self._directory.parent / f"damaged-{step}-{number}"
        (self._directory / str(step)).rename(target)
        self.say(f"It is kept as {target}")

    def _warn(self, words: str) -> None:
        if processes.is_main():
            self.say(f"Warning: {words}")


def unflatten(like: NestedMap, arrays: Arrays, what: str) -> NestedMap:
    """Returns `arrays` in the structure of `like`, a tree of VariableSpec.

    Raises ValueError naming the paths that are missing, left over, or of other shape or type.
    """
    specs = dict(like.flatten_items())
    check_fit(specs, arrays, what)
    return like.pack(arrays[path] for path in specs)


def versions() -> dict[str, str]:
    """Returns the versions a checkpoint records."""
    names = ("tensorflow", "orbax-checkpoint", "jax", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"lingvo_gshard": lingvo_gshard.__version__, **found}


def _steps_in(directory: pathlib.Path) -> list[int]:
    """The steps of the complete checkpoints: those still being written have longer names."""
    if not directory.is_dir():
        return []
    return sorted(int(child.name) for child in directory.iterdir() if child.name.isdigit())


def _parts_to_read(
    checkpoint: Checkpoint, like: NestedMap | None, parts: Sequence[str]
) -> list[str]:
    """Of what a checkpoint holds, the parts that are asked for."""
    held = [item for item in checkpoint.digests if like is None or item in like]
    return [item for item in held if item in parts] if parts else held


def _shardings(item: str, found: dict[str, Any], like: NestedMap | None) -> dict[str, Any]:
    """Returns path -> sharding or None; ValueError if the item does not fit `like`."""
    if like is None:
        return dict.fromkeys(found)
    expected = dict(like[item].flatten_items())
    check_fit(expected, found, IN_WORDS[item])
    return {path: struct.sharding for path, struct in expected.items()}


def _read_arrays(
    directory: pathlib.Path, shardings: dict[str, dict], digests: dict[str, dict[str, int]]
) -> dict[str, Arrays]:
    """Returns item -> arrays; an error in all processes if any cannot read what was saved."""
    arrays = processes.together(
        lambda: {
            item: checkpoint_arrays.read(directory / item, shardings[item]) for item in shardings
        }
    )
    for item, values in arrays.items():
        checkpoint_arrays.check_digests(values, digests[item], item)
    return arrays


def _none_left(directory: pathlib.Path, steps: list[int]) -> None:
    """Raises ValueError if there were checkpoints."""
    if steps:
        raise ValueError(f"{directory}: none of its {len(steps)} checkpoints is readable")
