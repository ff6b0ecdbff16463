"""DecodeBatch: the rows that one program decodes together, with their state on the devices.

A move is rare, so that copying costs less than compiling a program for each pair of shapes.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import jax
from lingvo_gshard.layers import MASKED
from lingvo_gshard.runtime import Array
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape, record_names
from lingvo_gshard.wings.inference.engine.waiting import DecodedText
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN, ModelFacts
from lingvo_gshard.wings.inference.programs.executables import (
    STEPS,
    DecodingExecutable,
    Executables,
    ProgramKey,
)

_TIME, _BIAS, _ANCESTOR = "state.time", "state.memory.bias_BK", "state.ancestor_BWT"
_RINGS, _SLOTTED = "state.caches", (".key", ".value", ".index")
# Keys and values [B,N,K,D] have their cache slots in this dimension.
_SLOTS = 2


def moved(
    state: Mapping[str, np.ndarray], targets: Sequence[Array], beam: int, rows: Sequence[int]
) -> list[np.ndarray]:
    """Returns the arrays of a state of another shape, with some rows of a state first.

    Positions that the new shape does not have must not be needed any more.
    """
    blocks: dict[str, list[Array]] = {}
    for array in targets:
        blocks.setdefault(_whole(array.path), []).append(array)
    whole = _joined(state)
    ring = next((path for path in blocks if _is_ring(path)), "")
    # Without slots any position of the ring stands for all.
    old = whole[ring].shape[_SLOTS] // beam if ring else 1
    new = sum(a.shape[_SLOTS] for a in blocks[ring]) // beam if ring else 1
    kept = min(old, new)
    # Position i of the new ring is the old one of the age kept - i.
    positions = (int(state[_TIME]) - kept + np.arange(kept)) % old
    taken: dict[str, np.ndarray] = {}
    for path, values in whole.items():
        count, shape = len(blocks[path]), list(blocks[path][0].shape)
        if count > 1:
            shape[_SLOTS] *= count
        if path == _TIME:
            moved_values = np.full((), kept, values.dtype)
        elif _is_ring(path):
            moved_values = _ring(values[rows], shape, positions, beam)
        elif path == _ANCESTOR:
            moved_values = _placed(values[rows][:, :, positions], shape)
        else:
            moved_values = _placed(values[rows], shape, MASKED if path == _BIAS else 0)
        parts = np.split(moved_values, count, axis=_SLOTS) if count > 1 else [moved_values]
        taken |= {array.path: part for array, part in zip(blocks[path], parts, strict=True)}
    return [taken[array.path] for array in targets]


def _whole(path: str) -> str:
    """Returns the path of keys or values without the number of the block."""
    head, bracket, _ = path.rpartition("[")
    return head if bracket and head.endswith(_SLOTTED) else path


def _is_ring(path: str) -> bool:
    """Returns whether an array of the state has slots for the positions of texts."""
    return path.startswith(_RINGS) and path.endswith(_SLOTTED)


def _joined(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a state with the blocks of keys and values joined."""
    blocks: dict[str, list[np.ndarray]] = {}
    for path, values in state.items():
        blocks.setdefault(_whole(path), []).append(values)
    return {
        path: found[0] if len(found) == 1 else np.concatenate(found, axis=_SLOTS)
        for path, found in blocks.items()
    }


def _ring(values: np.ndarray, shape: Sequence[int], positions: np.ndarray, beam: int) -> np.ndarray:
    """Returns keys or values of some positions of a ring as the first ones of another ring."""
    count, heads, slots, dim = values.shape
    rings = values.reshape(count, heads, slots // beam, beam, dim)[:, :, positions]
    return _placed(rings.reshape(count, heads, len(positions) * beam, dim), shape)


def _placed(values: np.ndarray, shape: Sequence[int], fill: float = 0) -> np.ndarray:
    """Returns an array of another shape, which begins with what it holds of `values`."""
    result = np.full(shape, fill, values.dtype)
    where = tuple(slice(size) for size in map(min, values.shape, shape))
    result[where] = values[where]
    return result


LOCAL_LETTERS = {
    "a": "texts that enter together",
    "p": "positions of given tokens",
    "w": "the two words of a random key",
}


@dataclasses.dataclass(frozen=True)
class Admission:
    """Texts that enter together, by the program of a key."""

    rows: tuple[DecodedText, ...]
    key: ProgramKey


class DecodeBatch:
    """Rows that are decoded together: one kind of search, one state on the devices."""

    def __init__(
        self,
        kind: SearchKind,
        facts: ModelFacts,
        executables: Executables,
        weights: Sequence[jax.Array],
    ):
        self.kind = kind
        self.shape: StateShape | None = None
        self.rows: list[DecodedText | None] = []
        self._facts, self._executables, self._weights = facts, executables, weights
        self._arrays: list[Array] = []
        self._state: list[jax.Array] | list[np.ndarray] = []

    @property
    def texts(self) -> list[DecodedText]:
        """The texts in rows."""
        return [row for row in self.rows if row is not None]

    @property
    def active(self) -> int:
        """The number of rows with a text."""
        return len(self.texts)

    @property
    def free(self) -> int:
        """The number of rows without a text."""
        return len(self.rows) - self.active

    @property
    def end(self) -> int:
        """The largest number of positions that any row has computed."""
        return max((row.position for row in self.rows if row), default=0)

    def resize(self, shape: StateShape) -> None:
        """Takes up another shape. Texts keep their state and may change their row."""
        if shape == self.shape:
            return
        arrays = self._executables.get(ProgramKey(STEPS, self.kind, shape)).inputs_of("state")
        if self.shape and self.active:
            taken = [index for index, row in enumerate(self.rows) if row]
            state = {a.path: np.asarray(x) for a, x in zip(self._arrays, self._state, strict=True)}
            self._state = moved(state, arrays, self.kind.beam, taken)
            self.rows = [self.rows[index] for index in taken]
        else:
            self._state = [np.zeros(array.shape, array.struct.dtype) for array in arrays]
            self.rows = []
        self.rows += [None] * (shape.rows - len(self.rows))
        self._arrays, self.shape = arrays, shape

    def admit(self, admission: Admission) -> None:
        """Lets texts into free rows. There must be enough of them."""
        program = self._executables.get(admission.key)
        if not self.active:
            # The ring restarts, so that steps read its first positions only.
            index = [array.path for array in self._arrays].index(_TIME)
            zero: Any = np.zeros((), np.int32)
            self._state[index] = zero
        rows = admission.rows
        places = [index for index, row in enumerate(self.rows) if row is None][: len(rows)]
        new = _new_texts(program, self._facts, rows)
        new["text_of_row_B"][:] = -1
        for text, place in enumerate(places):
            new["text_of_row_B"][place] = text
            self.rows[place] = rows[text]
        self._state = list(program.call(*self._weights, *self._state, *new.values()))

    def split(self, rows: Collection[DecodedText]) -> DecodeBatch:
        """Returns a new batch that has some of the texts, which leave this one.

        The new batch must take up another shape before it decodes.
        """
        batch = DecodeBatch(self.kind, self._facts, self._executables, self._weights)
        batch.shape, batch._arrays = self.shape, self._arrays
        batch._state = [np.asarray(values) for values in self._state]
        batch.rows = [row if row in rows else None for row in self.rows]
        self.rows = [None if row in rows else row for row in self.rows]
        return batch

    def drop_canceled(self) -> list[DecodedText]:
        """Frees the rows of texts that nobody waits for any more, and returns the texts."""
        canceled = [row for row in self.texts if row.answer.is_canceled]
        for row in canceled:
            row.cancel()
            self.rows[self.rows.index(row)] = None
        return canceled

    def step(self, most_steps: int, enough: int) -> list[DecodedText]:
        """Decodes until `most_steps` tokens more, or until `enough` texts have ended.

        Returns:
          The rows that are done. Their places are free afterwards.
        """
        program = self._executables.get(ProgramKey(STEPS, self.kind, self.shape))
        is_alive_B = np.array([row is not None for row in self.rows], np.int32)
        outputs = program.call(
            *self._weights, *self._state, is_alive_B, np.int32(most_steps), np.int32(enough)
        )
        count = len(self._state)
        self._state = list(outputs[:count])
        *records, active_B, generated_B = map(np.asarray, outputs[count:])
        named = dict(zip(record_names(self.kind), records, strict=True))
        done = []
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            taken = int(generated_B[index]) - row.generated
            row.add({n: x[:taken, index] for n, x in named.items()}, bool(active_B[index]))
            if row.is_done:
                done.append(row)
                self.rows[index] = None
        return done


def _new_texts(
    program: DecodingExecutable, facts: ModelFacts, rows: Sequence[DecodedText]
) -> dict[str, np.ndarray]:
    """Returns the arrays of texts that enter a state, filled in from their requests."""
    inputs = {array.path.removeprefix("new."): array for array in program.inputs_of("new")}
    new = {name: np.zeros(array.shape, array.dtype) for name, array in inputs.items()}
    for name in ("given_ap", "source_aK"):
        if name in new:
            new[name][:] = NO_TOKEN
    for text, row in enumerate(rows):
        request, options = row.answer.request, row.answer.request.options
        new["last_a"][text] = request.given[-1]
        if "source_aK" in new:
            new["source_aK"][text, : len(request.source)] = request.source
        before = request.given[:-1]
        if before and "given_ap" in new:
            new["given_ap"][text, -len(before) :] = before
        values = options.row_values() | {
            "limit_B": row.limit,
            "word_B": _word(request.given, row.text),
            "key_Bw": (options.seed, 0),
        }
        for leaf, value in values.items():
            if f"options.{leaf}" in new:
                new[f"options.{leaf}"][text] = value
        if "options.seen_BV" in new:
            new["options.seen_BV"][text, list(request.given)] = 1
        if "options.allowed_BV" in new:
            allowed_V = new["options.allowed_BV"][text]
            allowed_V[list(options.allowed_tokens) or slice(None)] = 1
            allowed_V[list(facts.end_ids)] = 1
            allowed_V[list(options.forbidden_tokens)] = 0
    return new


def _word(given: Sequence[int], text: int) -> int:
    """Returns an int32 that draws depend on: a hash of the given tokens and the text's number."""
    ids = np.array([*given, text], np.int32)
    return int(np.uint32(zlib.crc32(ids.tobytes())).view(np.int32))
