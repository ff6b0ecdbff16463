"""Lists, verifies, deletes and copies the checkpoints of a run that is not training."""

from __future__ import annotations

import os
import pathlib
import shutil
import time
from collections.abc import Sequence

import msgspec

from lingvo_gshard.core import UserError, is_bucket, objects, stores
from lingvo_gshard.training import (
    COMMIT_MARKER,
    NewestAndBest,
    best_of,
    marker,
    quiet_orbax,
    read_run,
    reason_of,
    steps_in,
    storage_of,
)
from lingvo_gshard.training import arrays as checkpoint_arrays

_NEW = ".partial"


class CheckpointFacts(msgspec.Struct, frozen=True):
    """One checkpoint of a listing: steps taken, bytes of its files, and versions by package.

    `is_best` is by `run.keep_best`. `problem` is "" if nothing was found.
    """

    step: int
    files: int
    bytes: int
    is_best: bool = False
    versions: dict[str, str] = {}
    problem: str = ""


def facts(directory: pathlib.Path) -> list[CheckpointFacts]:
    """Returns checkpoints by step without reading arrays. Raises UserError if a bucket fails."""
    steps = steps_in(directory)
    best = best_of(directory, steps)
    return [_facts(directory / str(step), step, bool(best) and best.step == step) for step in steps]


def _facts(path: pathlib.Path, step: int, is_best: bool) -> CheckpointFacts:
    sizes = [entry.size for entry in objects.find(path).values()]
    try:
        versions, problem = read_run(path).record.versions, ""
    except Exception as error:  # A damaged file raises errors of many types.
        versions, problem = {}, reason_of(error)
    return CheckpointFacts(step, len(sizes), sum(sizes), is_best, versions, problem)


def problem_of(directory: pathlib.Path, step: int) -> str:
    """Returns what is wrong with a checkpoint, whose arrays are read; "" if nothing is.

    One part of the state is in memory at a time.
    """
    quiet_orbax()
    path = directory / str(step)
    try:
        record = read_run(path).record
        for part, digests in record.digests.items():
            names = checkpoint_arrays.describe(path / part)
            found = checkpoint_arrays.read(path / part, dict.fromkeys(names))
            missing = sorted(set(digests) - set(found))
            if missing:
                raise UserError(f"{part} lacks {missing[0]}")
            checkpoint_arrays.check_digests(found, digests, part)
    except Exception as error:  # A damaged file raises errors of many types.
        return reason_of(error)
    return ""


def prunable(directory: pathlib.Path, keep: int) -> list[int]:
    """Returns the steps whose checkpoints are neither among the newest `keep` nor the best."""
    steps = steps_in(directory)
    policy, best = NewestAndBest(keep), best_of(directory, steps)
    policy.best_step = best.step if best else None
    kept = policy.kept(steps)
    return [step for step in steps if step not in kept]


def delete(directory: pathlib.Path, steps: Sequence[int]) -> None:
    """Deletes checkpoints. A process that is killed meanwhile leaves none with holes."""
    storage = storage_of(directory)
    for step in steps:
        storage.delete(step)


def copy(source: pathlib.Path, target: pathlib.Path, step: int) -> int:
    """Copies a checkpoint from one directory of checkpoints to another, and returns its bytes.

    Both may be in a bucket. The copy appears when it is complete.

    Raises:
      UserError: the target has a checkpoint of the step.
      OSError: it cannot be read or written.
    """
    if step in steps_in(target):
        raise UserError(f"{target} has a checkpoint of step {step:,} already")
    one, other = source / str(step), target / str(step)
    into = other if is_bucket(target) else target / f"{step}{_NEW}-{os.getpid()}"
    objects.make_folder(target)
    names = [name for name in objects.find(one) if name != COMMIT_MARKER]
    copied = 0
    try:
        for name in names:
            copied += _copy_file(f"{os.fspath(one)}/{name}", f"{os.fspath(into)}/{name}")
        if is_bucket(target):
            text = f"Checkpoint commit was successful: {time.time_ns()}"
            objects.write_bytes(marker(target, step), text.encode())
        else:
            into.rename(other)
    except BaseException:
        if not is_bucket(target):
            shutil.rmtree(into, ignore_errors=True)
        raise
    return copied


def _copy_file(source: str, target: str) -> int:
    if store := stores.store_of(target):
        if is_bucket(source):
            content = objects.read_bytes(source)
            store.write_bytes(target, content)
            return len(content)
        store.upload(source, target)
        return os.path.getsize(source)
    objects.make_folder(os.path.dirname(target))
    with objects.open_to_read(source) as file, open(target, "wb") as new:
        shutil.copyfileobj(file, new)
        return new.tell()
