"""Snapshots: copies of a run's state in the memory of its hosts, which outlive the process.

A snapshot has a part for each process: a file with the shards of the process's devices. The agent
of a host names the folder for the files, copies the parts of another host to the folder, and names
the file that a new process reads (wings/agents/keeper.py). A process that no agent has started
takes no snapshots.

As many processes as took a snapshot restore it from a part each. Any other number of processes can
restore it if each gets all parts. Otherwise the run resumes from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import NestedMap, jax, processes
from lingvo_gshard.training import (
    IN_RUN_RECORD,
    Arrays,
    Best,
    Checkpoint,
    Logdir,
    MetricsRow,
    ObservedRun,
    RunRecord,
    StepObserver,
    check_fit,
    part_titles,
)
from lingvo_gshard.wings.services.roll_back import count_roll_backs
from lingvo_gshard.wings.services.run_lock import ROUND
from lingvo_gshard.wings.services.snapshot_parts import FOLDER, RESTORED, Part

# A part that is complete is kept until the next one is.
_KEPT = 2
_LENGTH_BYTES = 8


class _Piece(msgspec.Struct):
    """A piece of an array.

    Attributes:
      part: part of the state, such as "theta".
      shape: shape of the whole array.
      start: the first index of the piece along each dimension.
      size: shape of the piece.
      place: where its bytes begin, after the header.
    """

    part: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    place: int


class _Header(msgspec.Struct):
    """The beginning of a part's file.

    Attributes:
      run: what tells the run from others in the same place.
      record: the record that a checkpoint would have, without digests.
      checksum: CRC-32 of the bytes after the header.
    """

    run: str
    record: RunRecord
    params_text: str
    pieces: list[_Piece]
    checksum: int


class SnapshotStore:
    """Takes snapshots. Every process of a run has a store and makes the same calls."""

    def __init__(self, run: str):
        """Opens the folder that an agent named, if any; `run` is what `snapshot_run` returns."""
        folder = os.environ.get(FOLDER)
        self._folder = pathlib.Path(folder) if folder else None
        self._run, self._serial = run, 0
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a folder for snapshots."""
        return self._folder is not None

    def save(
        self, step: int, state: NestedMap, position: Any, params_text: str, best: Best | None
    ) -> None:
        """Copies this process's part of the state, and writes the copy in the background."""
        assert self._folder is not None
        self.finish()
        self._serial += 1
        round_ = int(os.environ.get(ROUND, 0))
        part = Part(round_, self._serial, step, processes.count(), processes.index())
        record = RunRecord(step, position, {}, {}, best=best)
        pieces, contents = _copied(state)
        header = _Header(self._run, record, params_text, pieces, 0)
        self._thread = threading.Thread(
            target=self._write, args=[self._folder, part, header, contents], daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits for the write in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def begin_again(self, run: str) -> None:
        """Deletes this process's snapshots, after the run has gone back to a checkpoint.

        Args:
          run: what tells the run since then from the run before. Snapshots that other hosts keep
            are of no use any more.
        """
        self.finish()
        self._run = run
        if self._folder is not None:
            for part in Part.within(self._folder):
                (self._folder / part.name).unlink(missing_ok=True)

    def pop_problem(self) -> str | None:
        """Returns why a snapshot could not be written, once."""
        problem, self._problem = self._problem, None
        return problem

    def _write(
        self, folder: pathlib.Path, part: Part, header: _Header, contents: list[np.ndarray]
    ) -> None:
        new = folder / f"{part.name}.{os.getpid()}"
        own = [one for one in Part.within(folder) if one.index == part.index]
        try:
            for one in own[: 1 - _KEPT]:
                (folder / one.name).unlink(missing_ok=True)
            for content in contents:
                header.checksum = zlib.crc32(_bytes(content), header.checksum)
            text = msgspec.json.encode(header)
            with new.open("wb") as file:
                file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
                file.write(text)
                for content in contents:
                    file.write(_bytes(content))
            os.replace(new, folder / part.name)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self._problem = f"{folder}: {error.strerror}"


def snapshot_run(logdir: Logdir) -> str:
    """Returns the text that a snapshot has in common with the run, in all processes.

    It differs after the directory was deleted, and after the run went back to a checkpoint.
    """
    return processes.from_main(f"{logdir.number} {count_roll_backs(logdir.path)}")


def snapshots(run: ObservedRun) -> StepObserver | None:
    """Returns what takes the snapshots of a run, if an agent keeps them."""
    store = SnapshotStore(snapshot_run(run.logdir))
    return _Snapshots(run, store) if store.is_open else None


class _Snapshots(StepObserver):
    """Takes a snapshot every `run.snapshot_every_steps` steps."""

    def __init__(self, run: ObservedRun, store: SnapshotStore):
        self._run, self._store = run, store
        self.every = run.params.run.snapshot_every_steps
        self._has_begun = False

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Deletes the snapshots after a roll back."""
        if self._has_begun:
            self._store.begin_again(snapshot_run(self._run.logdir))
        self._has_begun = True

    def is_due(self, step: int) -> bool:
        """Returns whether a snapshot is taken after a step; the last one has a checkpoint."""
        return super().is_due(step) and step < self._run.params.run.steps

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Copies the state to the memory of the hosts."""
        run = self._run
        run.announce("takes a snapshot", run.params.run.save_seconds)
        # A snapshot whose steps lack rows would leave a gap in the metrics.
        run.writer.flush()
        position, text, state = run.batches.get_state(), run.params.to_text(), run.runtime.state()
        with run.saving_time.measured("snapshots"):
            self._store.save(step, state, position, text, run.best)
        if problem := self._store.pop_problem():
            run.say(f"Warning: a snapshot could not be written ({problem})")


def restore(
    run: str, newest: Checkpoint | None, abstract_state: NestedMap | None
) -> Checkpoint | None:
    """Returns the snapshot that the agents chose; None if a process cannot read its part.

    A snapshot that is no newer than `newest`, the newest checkpoint, is of no use. Arrays are as in
    `abstract_state`, a tree of jax.ShapeDtypeStructs; without it NumPy's.
    """
    paths = os.environ.get(RESTORED)
    found = None
    if paths:
        # Damage, another model and a shard that is elsewhere: the checkpoint has all of it.
        with contextlib.suppress(OSError, ValueError, LookupError):
            read = _read([pathlib.Path(path) for path in paths.split(os.pathsep)], run)
            _check(read[1], abstract_state)
            found = read
    steps = processes.gather(found[0].record.step if found else -1)
    if found is None or len(set(steps)) > 1 or (newest and steps[0] <= newest.step):
        return None
    header, arrays = found
    extras = newest.extras if newest else pathlib.Path(os.devnull)
    return Checkpoint(header.record, header.params_text, extras, _placed(arrays, abstract_state))


def _copied(state: NestedMap) -> tuple[list[_Piece], list[np.ndarray]]:
    """Copies the shards of this process's devices, each once."""
    pieces, contents, place = [], [], 0
    for part, tree in state.items():
        for path, array in () if part in IN_RUN_RECORD else tree.flatten_items():
            shards = {}
            if isinstance(array, jax.Array):
                for shard in array.addressable_shards:
                    shards.setdefault(tuple(one.start or 0 for one in shard.index), shard.data)
            else:
                shards[(0,) * np.ndim(array)] = array
            for start, data in shards.items():
                # A step that donates its state writes over the memory of the shard.
                content = np.array(data, order="C", copy=True)
                shape = tuple(np.shape(array))
                pieces.append(
                    _Piece(part, path, content.dtype.name, shape, start, content.shape, place)
                )
                contents.append(content)
                place += content.nbytes
    return pieces, contents


# Part of the state -> path -> the pieces of the array.
_Arrays = dict[str, dict[str, list[tuple[_Piece, np.ndarray]]]]


def _read(paths: list[pathlib.Path], run: str) -> tuple[_Header, _Arrays]:
    """Reads parts of one snapshot. Returns the header of the first, and the pieces of all.

    Raises:
      OSError: a file cannot be read.
      ValueError: a part is damaged, or of another run.
    """
    arrays: _Arrays = {}
    headers = []
    for path in paths:
        # Not read at once: the parts of all processes may be large, and are in memory already.
        raw = np.memmap(path, np.uint8, "r")
        begin = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
        header = msgspec.json.decode(raw[_LENGTH_BYTES:begin].tobytes(), type=_Header)
        content = raw[begin:]
        if header.run != run or zlib.crc32(_bytes(content)) != header.checksum:
            raise ValueError(f"{path} is damaged, or of another run")
        headers.append(header)
        for piece in header.pieces:
            dtype = np.dtype(piece.dtype)
            size = int(np.prod(piece.size, dtype=np.int64)) * dtype.itemsize
            data = content[piece.place : piece.place + size].view(dtype).reshape(piece.size)
            arrays.setdefault(piece.part, {}).setdefault(piece.path, []).append((piece, data))
    return headers[0], arrays


def _check(arrays: _Arrays, abstract_state: NestedMap | None) -> None:
    """Checks that the pieces make the state. Raises a ValueError or a LookupError if not."""
    for part, found in arrays.items():
        if abstract_state is None:
            continue
        expected = dict(abstract_state[part].flatten_items())
        stored = {
            name: jax.ShapeDtypeStruct(pieces[0][0].shape, np.dtype(pieces[0][0].dtype))
            for name, pieces in found.items()
        }
        check_fit(expected, stored, part_titles()[part])
        for name, struct in expected.items():
            indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()
            for index in indices:
                if index is not None:
                    _overlaps(found[name], index)


def _placed(arrays: _Arrays, abstract_state: NestedMap | None) -> dict[str, Arrays]:
    """Puts the pieces on the devices."""
    result: dict[str, Arrays] = {}
    for part, found in arrays.items():
        result[part] = {}
        structs = dict(abstract_state[part].flatten_items()) if abstract_state else {}
        for name, pieces in found.items():
            struct = structs.get(name)
            if struct is None:
                result[part][name] = pieces[0][1]
                continue
            result[part][name] = jax.make_array_from_callback(
                struct.shape, struct.sharding, lambda index, pieces=pieces: _slice(pieces, index)
            )
    return result


# A place in a shard, and the data for it.
_Overlap = tuple[tuple[slice, ...], np.ndarray]


def _slice(pieces: list[tuple[_Piece, np.ndarray]], index: Any) -> np.ndarray:
    """Returns a copy of the part of an array at an index; LookupError if pieces are missing."""
    shape, overlaps = _overlaps(pieces, index)
    result = np.empty(shape, pieces[0][1].dtype)
    for place, data in overlaps:
        result[place] = data
    return result


def _overlaps(
    pieces: list[tuple[_Piece, np.ndarray]], index: Any
) -> tuple[tuple[int, ...], list[_Overlap]]:
    """Returns the shape of a part of an array, and what the pieces have of it."""
    sizes = pieces[0][0].shape
    bounds = [one.indices(size)[:2] for one, size in zip(index, sizes, strict=True)]
    # Two shards are disjoint or the same.
    found: dict[tuple[int, ...], _Overlap] = {}
    for piece, data in pieces:
        common = [
            (max(low, start), min(high, start + size))
            for (low, high), start, size in zip(bounds, piece.start, piece.size, strict=True)
        ]
        if all(low < high for low, high in common):
            place = _shifted(common, [low for low, _ in bounds])
            found[piece.start] = place, data[_shifted(common, piece.start)]
    shape = tuple(high - low for low, high in bounds)
    if sum(data.size for _, data in found.values()) != np.prod(shape, dtype=np.int64):
        raise LookupError("a shard is not in the snapshot")
    return shape, list(found.values())


def _shifted(bounds: Sequence[tuple[int, int]], starts: Sequence[int]) -> tuple[slice, ...]:
    """Returns bounds relative to where an array begins."""
    return tuple(
        slice(low - start, high - start) for (low, high), start in zip(bounds, starts, strict=True)
    )


def _bytes(content: np.ndarray) -> memoryview:
    return content.reshape(-1).view(np.uint8).data
