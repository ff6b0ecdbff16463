"""Checkpoints: what a run needs to go on, written by Orbax in the background and never half.

A checkpoint `checkpoints/<step>/` holds three items: `theta` and `slots` (arrays by their dotted
paths, so that any mesh can read them), and `run` (run.json: step, data position, versions and a
CRC-32 of every array; params.txt; extras/: files of the input such as its vocabularies).

Orbax counts jax devices when it starts. Set JAX_PLATFORMS=cpu where jax must not take the GPU.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib.metadata
import json
import logging
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

import lingvo_gshard
from lingvo_gshard.core.nested_map import NestedMap

Arrays = dict[str, np.ndarray]
Say = Callable[[str], None]
WriteExtras = Callable[[pathlib.Path], None]


@dataclasses.dataclass
class Checkpoint:
    """A restored checkpoint: arrays by dotted path, the data position, and where its files are."""

    step: int
    theta: Arrays
    slots: Arrays
    position: Any
    params_text: str
    versions: dict[str, str]
    extras: pathlib.Path


class _RunHandler(ocp.CheckpointHandler):
    """Writes and reads the `run` item."""

    def save(self, directory, args: _RunSave) -> None:
        directory = pathlib.Path(directory)
        digests = {item: _digests(arrays) for item, arrays in args.arrays.items()}
        record = json.dumps({**args.record, "digests": digests}, indent=1)
        (directory / "run.json").write_text(record, encoding="utf-8")
        (directory / "params.txt").write_text(args.params_text, encoding="utf-8")
        (directory / "extras").mkdir()
        if args.write_extras is not None:
            args.write_extras(directory / "extras")

    def restore(self, directory, args: _RunRestore) -> dict[str, Any]:
        directory = pathlib.Path(directory)
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        record["params_text"] = (directory / "params.txt").read_text(encoding="utf-8")
        return record


@ocp.args.register_with_handler(_RunHandler, for_save=True)
@dataclasses.dataclass
class _RunSave(ocp.args.CheckpointArgs):
    record: dict[str, Any]
    arrays: dict[str, Arrays]
    params_text: str
    write_extras: WriteExtras | None


@ocp.args.register_with_handler(_RunHandler, for_restore=True)
@dataclasses.dataclass
class _RunRestore(ocp.args.CheckpointArgs):
    pass


class CheckpointStore:
    """The checkpoints of one run: saved asynchronously and atomically, the last `keep` of them.

    A save that fails is reported through `say` and loses nothing that was saved before. `writable`
    False reads only, and leaves every file as it is.
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
        _quiet_orbax()
        self._manager = self._open()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps()) if self._manager else []

    def save(
        self,
        step: int,
        state: NestedMap,
        position: Any,
        params_text: str,
        write_extras: WriteExtras | None = None,
    ) -> None:
        """Starts to save; returns as soon as `state`'s NumPy arrays may not be changed any more.

        position: what the input's `get_state` gave after the last batch of `step`.
        write_extras: called with an empty directory inside the checkpoint.
        """
        self.finish()
        theta, slots = dict(state.theta.flatten_items()), dict(state.slots.flatten_items())
        record = {"step": step, "position": position, "versions": versions()}
        run = _RunSave(record, {"theta": theta, "slots": slots}, params_text, write_extras)
        arguments = ocp.args.Composite(
            theta=ocp.args.PyTreeSave(theta), slots=ocp.args.PyTreeSave(slots), run=run
        )
        self._saving = step
        try:
            _check_room(self._directory, theta, slots)
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:  # Orbax and TensorStore raise many types when a disk is full.
            self._failed(error)

    def finish(self) -> bool:
        """Waits for the save under way; True if there was none or it succeeded."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._failed(error)
            return False
        self._saving = None
        return True

    def poll(self) -> None:
        """Reports a save that has failed in the background, without waiting for one under way."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.finish()

    def restore(self, with_slots: bool = True) -> Checkpoint | None:
        """Returns the newest readable checkpoint, or None if there is none at all.

        A damaged one is reported, set aside as `damaged-<step>` where the store is writable, and
        the one before is taken. Raises ValueError if all are damaged.
        """
        steps = self.steps
        for step in reversed(steps):
            try:
                return self._read(step, with_slots)
            except Exception as error:  # A damaged file shows itself in any way it likes.
                self.say(f"Warning: the checkpoint of step {step} is damaged: {_reason(error)}")
                self._set_aside(step)
        if steps:
            raise ValueError(f"{self._directory}: none of its {len(steps)} checkpoints is readable")
        return None

    def close(self) -> None:
        """Waits for the save under way and lets go of Orbax's threads."""
        self.finish()
        if self._manager:
            self._manager.close()

    def _open(self) -> ocp.CheckpointManager | None:
        if not self._writable and not self._directory.is_dir():
            return None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.LatestN(self._keep),
            cleanup_tmp_directories=self._writable,
            read_only=not self._writable,
            create=self._writable,
        )
        return ocp.CheckpointManager(
            self._directory, options=options, item_names=("theta", "slots", "run")
        )

    def _read(self, step: int, with_slots: bool) -> Checkpoint:
        items = {"theta": ocp.args.PyTreeRestore(), "run": _RunRestore()}
        if with_slots:
            items["slots"] = ocp.args.PyTreeRestore()
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        record = restored["run"]
        arrays = {name: restored[name] for name in items if name != "run"}
        for name, values in arrays.items():
            _check_digests(name, record["digests"][name], _digests(values))
        return Checkpoint(
            step=record["step"],
            theta=arrays["theta"],
            slots=arrays.get("slots", {}),
            position=record["position"],
            params_text=record["params_text"],
            versions=record["versions"],
            extras=self._directory / str(step) / "run" / "extras",
        )

    def _failed(self, error: Exception) -> None:
        step, self._saving = self._saving, None
        self._manager.close()
        self._manager = self._open()
        last = f"the last good one is step {self.steps[-1]}" if self.steps else "there is none yet"
        self.say(
            f"Warning: the checkpoint of step {step} could not be saved ({_reason(error)}); {last}"
        )

    def _set_aside(self, step: int) -> None:
        if not self._writable:
            return
        source, number = self._directory / str(step), 0
        target = self._directory.parent / f"damaged-{step}"
        while target.exists():
            number += 1
            target = self._directory.parent / f"damaged-{step}-{number}"
        source.rename(target)
        self.say(f"It is kept as {target}")
        self._manager.reload()


def unflatten(like: NestedMap, arrays: Arrays, what: str) -> NestedMap:
    """Returns `arrays` in the structure of `like`, a tree of VariableSpec.

    Raises ValueError naming the paths that are missing, left over or of another shape.
    """
    specs = dict(like.flatten_items())
    wrong = [f"{path} is missing" for path in specs if path not in arrays]
    wrong += [f"{path} is not in the model" for path in arrays if path not in specs]
    wrong += [
        f"{path} is {arrays[path].shape}, the model's is {spec.shape}"
        for path, spec in specs.items()
        if path in arrays and tuple(arrays[path].shape) != tuple(spec.shape)
    ]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ValueError(f"The checkpoint's {what} do not fit the model: {shown}")
    return like.pack(arrays[path] for path in specs)


def versions() -> dict[str, str]:
    """Returns the versions a checkpoint records."""
    names = ("tensorflow", "orbax-checkpoint", "jax", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"lingvo_gshard": lingvo_gshard.__version__, **found}


def _digests(arrays: Arrays) -> dict[str, int]:
    return {path: zlib.crc32(np.ascontiguousarray(array)) for path, array in arrays.items()}


def _check_digests(item: str, expected: dict[str, int], found: dict[str, int]) -> None:
    wrong = sorted(path for path in expected if found.get(path) != expected[path])
    if wrong:
        raise ValueError(f"{item} has other contents than were saved: {', '.join(wrong[:3])}")


def _check_room(directory: pathlib.Path, *arrays: Arrays) -> None:
    """Raises OSError if the disk has no room, rather than fill it for everyone else."""
    needed = sum(array.nbytes for tree in arrays for array in tree.values()) + 2**20
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"no space left: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free"
        )


@functools.cache
def _quiet_orbax() -> None:
    """Drops what follows a failure that the store reports in one line.

    Orbax logs a traceback from each of its threads, and TensorStore's other reads and writes end
    after the event loop that waited for them.
    """
    logging.getLogger("absl").addFilter(
        lambda record: "orbax" not in pathlib.PurePath(record.pathname).parts
    )
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )
    plain = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            plain(unraisable)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    """An error in a line: what the system says of a full disk, else its type and first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "No space left on device" in str(error):
        return "no space left on device"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
