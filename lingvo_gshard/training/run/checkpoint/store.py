"""The checkpoints of a run: written by Orbax in the background, and complete or not there at all.

A checkpoint `checkpoints/<step>/` holds an item for each part of the state that has arrays, such as
`theta` and `moments`, and the item `run` (run_item.py). Arrays are stored by their dotted paths.
The files do not depend on how arrays were sharded.

Orbax counts jax devices when it starts. Set JAX_PLATFORMS=cpu where jax must not take the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import NestedMap, UserError, processes, stores
from lingvo_gshard.core.lazy import ocp
from lingvo_gshard.core.signals import State
from lingvo_gshard.training.run.checkpoint import arrays as checkpoint_arrays
from lingvo_gshard.training.run.checkpoint import run_item
from lingvo_gshard.training.run.checkpoint.choice import NEWEST, best_of, in_order
from lingvo_gshard.training.run.checkpoint.orbax_storage import quiet_orbax, reason_of, steps_in
from lingvo_gshard.training.run.checkpoint.storage import SAVE_BARRIERS, NewestAndBest, storage_of
from lingvo_gshard.training.step.state_part import part_titles

Say = Callable[[str], None]

# A save of several processes fails if one of them takes longer than this.
_SAVE_SECONDS = 1800


class CheckpointStore:
    """The checkpoints of one run.

    Saves are asynchronous and atomic. A save that fails is reported and leaves older checkpoints
    alone. In a cluster each process has a store of the same directory and makes the same calls; the
    main process reports.

    Attributes:
      advice: tells the user what to do if a checkpoint could not be saved.
      say: prints a line.
      steps: the steps that have a complete checkpoint, ascending.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        say: Say = print,
        writable: bool = True,
        choice: str | int = NEWEST,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """Opens a directory of checkpoints.

        Args:
          directory: on a disk or in a bucket; created if the store is writable.
          keep: number of newest checkpoints to keep; older ones but the best are deleted.
          writable: False leaves every file as it is.
          choice: which checkpoint is read first, as in `in_order`. A store that is writable
            reads the newest.
          before_commit: called before a checkpoint in a bucket becomes complete.
        """
        self._directory = stores.absolute(directory)
        self._storage = storage_of(self._directory, before_commit)
        self.advice = self._storage.advice
        self._policy = NewestAndBest(keep)
        self.say = say
        self._writable = writable
        self._choice = choice
        self._saving: tuple[int, run_item.Best | None] | None = None
        quiet_orbax()
        self._manager = self._open()

    def save(
        self,
        step: int,
        state: NestedMap,
        position: Any,
        params_text: str,
        write_extras: run_item.WriteExtras | None = None,
        best: run_item.Best | None = None,
    ) -> None:
        """Starts a save. Returns as soon as the arrays may be changed or donated.

        Args:
          step: number of steps taken.
          state: parts of NumPy arrays or jax.Arrays. Each process writes its shards of jax.Arrays.
          position: the input's `get_state()` after the last batch of `step`.
          write_extras: writes files into an empty directory of the checkpoint.
          best: the best evaluation of the run so far. The checkpoint of its step is kept.
        """
        self.finish()
        arrays = {
            part: dict(tree.flatten_items())
            for part, tree in state.items()
            if part not in checkpoint_arrays.IN_RUN_RECORD
        }
        self._saving = step, best
        try:
            manager: Any = self._manager or self._open()
            self._manager = manager
            own = sum(
                checkpoint_arrays.bytes_to_write(a) for p in arrays.values() for a in p.values()
            )
            self._storage.check_writable(sum(processes.gather(own)) + 2**20)
            digests = {part: checkpoint_arrays.digests(arrays[part]) for part in arrays}
            record = run_item.RunRecord(step, position, run_item.versions(), digests, best=best)
            items: dict[str, Any] = {
                part: checkpoint_arrays.save_arguments(arrays[part]) for part in arrays
            }
            items[run_item.ITEM] = self._storage.run_save(record, params_text, write_extras)
            arguments = ocp.args.Composite(**items)
            processes.together(lambda: manager.save(step, args=arguments, force=True))
        except Exception as error:  # Orbax and TensorStore raise many types when a disk is full.
            self._abandon_save(error)

    def finish(self) -> bool:
        """Waits for the save in progress. Returns False if it failed."""
        if self._saving is None:
            return True
        assert self._manager
        try:
            processes.together(self._manager.wait_until_finished)
        except Exception as error:
            self._abandon_save(error)
            return False
        (step, best), self._saving = self._saving, None
        self.steps = self._policy.kept([*self.steps, step])
        # Only now, since the save of a new best could have failed.
        self._policy.best_step = best.step if best else None
        return True

    def poll(self) -> None:
        """Reports a save that has failed, without waiting for one that is in progress."""
        if self._saving and self._manager:
            if not any(processes.gather(self._manager.is_saving_in_progress())):
                self.finish()

    def peek(self) -> run_item.Checkpoint | None:
        """Returns the first checkpoint with a readable `run` item, without arrays; else None.

        The newest is the first, unless another was chosen.

        Raises:
          UserError: there are checkpoints, but none is readable, or a later version of the
            library wrote the newest.
        """
        for step in self._order():
            path = self._directory / str(step)
            self._check_format(path)
            try:
                return processes.together(lambda path=path: run_item.read_run(path))
            except Exception:  # `restore` reports the damage and sets the checkpoint aside.
                continue
        return self._none_readable(self.steps)

    def restore(
        self,
        abstract_state: NestedMap | None = None,
        parts: Sequence[str] = (),
        before: int | None = None,
    ) -> run_item.Checkpoint | None:
        """Returns the first readable checkpoint: the newest, unless another was chosen.

        A damaged checkpoint is reported, renamed to `damaged-<step>` if the store is writable, and
        the next one is read.

        Args:
          abstract_state: a tree of jax.ShapeDtypeStructs. Arrays become jax.Arrays with these
            shardings, and each process reads its own shards only. An array without a sharding
            becomes a NumPy array. None makes every array a NumPy array.
          parts: the parts of the state to read; empty reads all.
          before: only checkpoints of earlier steps are read; None reads any.

        Returns:
          None if there is no checkpoint.

        Raises:
          UserError: all checkpoints are damaged, the newest does not fit `abstract_state`, or a
            later version of the library wrote it.
        """
        self.finish()
        steps = [step for step in self._order() if before is None or step < before]
        for step in steps:
            path = self._directory / str(step)
            self._check_format(path)
            try:
                checkpoint, stored = processes.together(
                    lambda path=path: _describe(path, abstract_state, parts)
                )
            except Exception as error:  # A damaged file raises errors of many types.
                self._set_aside(step, error)
                continue
            # Outside the try block: a model that does not fit is no damage.
            shardings = {part: _shardings(part, stored[part], abstract_state) for part in stored}
            try:
                arrays = _read_arrays(path, shardings, checkpoint.record.digests)
            except Exception as error:
                self._set_aside(step, error)
                continue
            return dataclasses.replace(checkpoint, arrays=arrays)
        return self._none_readable(steps)

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, the newest first."""
        self.finish()
        for later in reversed([one for one in self.steps if one > step]):
            _on_main(lambda later=later: self._storage.delete(later))
            self.steps.remove(later)
        if self._manager is not None:
            self._manager.reload()

    def close(self) -> None:
        """Waits for the save in progress and stops Orbax's threads."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._warn(f"the last checkpoint could not be saved ({self._storage.reason_of(error)})")
        self._close_manager()

    def _open(self) -> ocp.CheckpointManager | None:
        if self._writable:
            _on_main(self._storage.prepare)
        self.steps = processes.from_main(steps_in(self._directory))
        if not self._writable:
            order = in_order(self._directory, self.steps, self._choice)
            self._preferred = processes.from_main(order)
            return None
        best = best_of(self._directory, self.steps) if processes.is_main() else None
        self._policy.best_step = processes.from_main(best.step if best else None)
        several = processes.count() > 1
        options = ocp.CheckpointManagerOptions(
            **self._storage.options(self._policy),
            create=False,
            # If a thread could not create a directory, Orbax's other threads would wait for it
            # for 300 seconds and then report that.
            async_options=ocp.AsyncOptions(
                timeout_secs=_SAVE_SECONDS,
                barrier_sync_fn=next((make() for make in SAVE_BARRIERS if several), None),
                create_directories_asynchronously=False,
            ),
            # Naming the processes makes them wait for one another with a time limit.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(processes.count())) if several else None
            ),
        )
        item_names = (*part_titles(), run_item.ITEM)
        return ocp.CheckpointManager(self._directory, options=options, item_names=item_names)

    def _order(self) -> list[int]:
        """Returns the steps whose checkpoints are tried, the first to read first."""
        if self._writable:
            return self.steps[::-1]
        return [step for step in self._preferred if step in self.steps]

    def _check_format(self, path: pathlib.Path) -> None:
        """Raises ValueError, in all processes, if a later version wrote a checkpoint.

        It is not damaged, so it must not be set aside.
        """
        problem = processes.from_main(run_item.newer_format(path) if processes.is_main() else None)
        if problem:
            raise UserError(problem)

    def _close_manager(self) -> None:
        # After a failed save, Orbax may raise an error from another thread here, such as the thread
        # that writes metadata. The failure of the save has been reported by then.
        with contextlib.suppress(Exception):
            if self._manager is not None:
                self._manager.close()

    def _abandon_save(self, error: Exception) -> None:
        """Reports a failed save and starts Orbax again, which does not recover by itself."""
        assert self._saving
        (step, _), self._saving = self._saving, None
        reason = self._storage.reason_of(error)
        self._close_manager()
        self._manager = None
        # A bucket that does not answer: the next save tries again.
        with contextlib.suppress(OSError, processes.SharedError):
            self._manager = self._open()
        last = f"the last good one is step {self.steps[-1]}" if self.steps else "there is none"
        self._warn(f"the checkpoint of step {step} could not be saved ({reason}); {last}")

    def _set_aside(self, step: int, error: Exception) -> None:
        """Reports a damaged checkpoint and renames it if the store is writable."""
        if State.training is not None:
            State.training.raise_if_stopped()
        self._warn(f"the checkpoint of step {step} is damaged: {reason_of(error)}")
        self.steps.remove(step)
        if self._writable:
            moved = "The damaged checkpoint was moved to"
            _on_main(lambda: self.say(f"{moved} {self._storage.set_aside(step)}"))
            if self._manager is not None:
                self._manager.reload()

    def _none_readable(self, steps: list[int]) -> None:
        """Returns None if there were no checkpoints, else raises ValueError."""
        if steps:
            raise UserError(f"{self._directory}: none of its {len(steps)} checkpoints is readable")

    def _warn(self, text: str) -> None:
        if processes.is_main():
            self.say(f"Warning: {text}")


def _on_main(function: Callable[[], Any]) -> Any:
    """Returns `function()` in the main process. All processes raise its error."""
    return processes.together(lambda: function() if processes.is_main() else None)


def _describe(
    directory: pathlib.Path, abstract_state: NestedMap | None, parts: Sequence[str]
) -> tuple[run_item.Checkpoint, dict[str, dict[str, Any]]]:
    """Returns a checkpoint without arrays, and the stored arrays of the parts to read."""
    checkpoint = run_item.read_run(directory)
    stored = [
        part
        for part in checkpoint.record.digests
        if (abstract_state is None or part in abstract_state) and (not parts or part in parts)
    ]
    return checkpoint, {part: checkpoint_arrays.describe(directory / part) for part in stored}


def _shardings(
    part: str, stored: dict[str, Any], abstract_state: NestedMap | None
) -> dict[str, Any]:
    """Returns path -> sharding or None; ValueError if the part does not fit `abstract_state`."""
    if abstract_state is None:
        return dict.fromkeys(stored)
    expected = dict(abstract_state[part].flatten_items())
    checkpoint_arrays.check_fit(expected, stored, part_titles()[part])
    return {path: struct.sharding for path, struct in expected.items()}


def _read_arrays(
    directory: pathlib.Path, shardings: dict[str, dict], digests: dict[str, dict[str, int]]
) -> dict[str, checkpoint_arrays.Arrays]:
    """Returns part -> arrays. Raises an error in all processes if one cannot read its arrays."""
    arrays = processes.together(
        lambda: {
            part: checkpoint_arrays.read(directory / part, shardings[part]) for part in shardings
        }
    )
    for part, values in arrays.items():
        checkpoint_arrays.check_digests(values, digests[part], part)
    return arrays
