"""PackedBatches: the endless stream of packed training batches, which resumes exactly.

Sentences are drawn and packed in blocks. A block is a function of the seed, the block's number and
the few sentences carried over from the block before. The position in the stream is therefore small,
and resuming recomputes one block, however long the run is.

grain is not used, since it calls Python once per sentence and stage. A grain pipeline of mixing,
shuffling and first-fit packing reached 80 thousand tokens a second per core, at an equal share of
filled positions. This code reaches 5 million.

A resumed run needs the same order under every version of every library, so no library draws it.

The sentences drawn for a block are a function of the seed and the block's number. Resuming
therefore replays no random generator.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import Batch, PackedBatch

# Below, a table is faster, and uniform over all permutations.
_SMALLEST_NETWORK = 1 << 12
_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permutation(size: int, *key: int) -> np.ndarray:
    """Returns a pseudo-random permutation of range(size) that depends only on `key`.

    It sorts splitmix64 hashes (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195).
    """
    with np.errstate(over="ignore"):
        hashes = splitmix64(np.arange(size, dtype=np.uint64) * _GOLDEN + _state(key))
    return np.argsort(hashes, kind="stable")


def permuted(places: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Returns the elements at some places of a pseudo-random permutation of range(size).

    The permutation depends on size and key, and is never held in memory: a Feistel network (Luby
    and Rackoff 1988, https://doi.org/10.1137/0217022) permutes the next larger power of four, and
    is applied again to results beyond the range (cycle walking; Black and Rogaway 2002,
    https://doi.org/10.1007/3-540-45760-7_9).

    Args:
      places: int64, each in range(size).
      size: number of elements.
      key: integers.
    """
    if size < _SMALLEST_NETWORK:
        return permutation(size, *key)[places]
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    with np.errstate(over="ignore"):
        state = _state(key)
        keys = [splitmix64(state + np.uint64(i) * _GOLDEN) for i in range(_ROUNDS)]
        result = _feistel(places.astype(np.uint64), half, keys)
        outside = np.flatnonzero(result >= size)
        while len(outside):
            result[outside] = _feistel(result[outside], half, keys)
            outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: list[np.uint64]) -> np.ndarray:
    """Returns values of 2 * half bits, each replaced by another one."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + key) & mask)
    return left << half | right


def _state(key: tuple[int, ...]) -> np.uint64:
    state = np.uint64(0)
    for part in key:
        state = splitmix64(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return state


def splitmix64(x: Any) -> Any:
    """Returns numbers or arrays of uint64 with their bits mixed. The caller ignores overflows."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_UNITS = 1 << 32


def temperature_probabilities(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Returns the sampling probability of each language: p_l ~ n_l ** (1 / temperature).

    Source: Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019.

    Args:
      counts: number of sentences n_l of each language.
      temperature: 1 keeps the proportions of the data; infinity makes all languages equal.

    Raises:
      UserError: the temperature or a count is below 1.
    """
    if not temperature >= 1:
        raise UserError(f"temperature must be at least 1, not {temperature}")
    amounts = np.asarray(counts, np.float64)
    if amounts.size == 0 or amounts.min() < 1:
        raise UserError("Every language needs at least one sentence to be sampled from")
    # Computed through logarithms so that small exponents cannot overflow.
    weights = np.exp(np.log(amounts / amounts.max()) / temperature)
    return weights / weights.sum()


class Mixture:
    """An endless stream of sentence numbers in blocks of about `block_size`.

    Language l has the share p_l of every block, to within one sentence, and exactly in the long
    run. It goes through all its sentences in random order before any is repeated.

    Attributes:
      probabilities: p_l of each language, languages sorted by name.
    """

    def __init__(
        self,
        members: Mapping[str, np.ndarray],
        temperature: float,
        block_size: int,
        seed: int,
    ):
        """Prepares the stream.

        Args:
          members: language -> numbers of its sentences.
          temperature: see `temperature_probabilities`.
          block_size: sentences of a block.
          seed: seed of all orders.
        """
        self._languages = sorted(members)
        self._members = [np.asarray(members[language]) for language in self._languages]
        self.probabilities = temperature_probabilities([len(m) for m in self._members], temperature)
        # Integers, so that positions far into the stream are exact.
        self._units = [max(1, round(p * _UNITS)) for p in self.probabilities]
        self._phases = permutation(len(self._units), seed, 1)
        self._block_size = block_size
        self._seed = seed
        self._epoch = functools.lru_cache(maxsize=2 * len(self._units))(self._epoch_order)

    def block(self, number: int) -> np.ndarray:
        """Returns the sentence numbers of one block, shuffled."""
        parts = []
        for index, members in enumerate(self._members):
            begin, end = self._position(index, number), self._position(index, number + 1)
            while begin < end:
                epoch, offset = divmod(begin, len(members))
                taken = self._epoch(index, epoch)[offset : offset + end - begin]
                parts.append(members[taken])
                begin += len(taken)
        sentences = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return sentences[permutation(len(sentences), self._seed, 2, number)]

    def _position(self, index: int, block: int) -> int:
        # A small language has one sentence in some blocks; phases spread these over the stream.
        phase = (2 * int(self._phases[index]) + 1) * _UNITS // (2 * len(self._units))
        before = block * self._block_size * self._units[index]
        return (before + phase) // _UNITS

    def _epoch_order(self, index: int, epoch: int) -> np.ndarray:
        return permutation(len(self._members[index]), self._seed, 3, index, epoch)


# The last rows opened are not full yet. Their sentences are carried into the next block.
_UNFINISHED_ROWS = 4


class PackedBatches:
    """An endless iterator over training batches whose position can be saved and restored.

    The state consists of JSON values: the number of the block, the number of the batch in the
    block, the sentences carried into the block, and an identity of seed and data. A state with
    another identity is refused.
    """

    def __init__(self, packer: packing.Packer, mixture: Mixture, identity: str):
        """Starts at the first batch.

        Args:
          packer: packs examples, known by their numbers, into batches.
          mixture: gives the numbers of the examples of each block.
          identity: a digest of seed and data.
        """
        self._packer = packer
        self._mixture = mixture
        self._identity = identity
        self._move_to(block=0, batch=0, carried=())

    def __iter__(self) -> PackedBatches:
        return self

    def __next__(self) -> Batch:
        if self._rows is None:
            self._pack_block()
        while self._batch >= self._batches_in_block:
            self._move_to(self._block + 1, 0, self._left_over)
            self._pack_block()
        assert self._rows is not None
        begin = self._batch * self._packer.batch_rows
        chosen = (self._rows >= begin) & (self._rows < begin + self._packer.batch_rows)
        self._batch += 1
        rows, sentences = self._rows[chosen] - begin, self._sentences[chosen]
        return PackedBatch.of(self._packer.pack(rows, sentences), rows, sentences)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned, as JSON values."""
        return {
            "stream": self._identity,
            "block": self._block,
            "batch": self._batch,
            "carried": [int(sentence) for sentence in self._carried],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position; ValueError if it is of a stream with other data, seed or shapes."""
        if state.get("stream") != self._identity:
            raise UserError(
                "The saved data position belongs to another stream: the training data, its "
                "settings (input.*) or the seed have changed since it was saved "
                f"({state.get('stream')!r} there, {self._identity!r} here)"
            )
        self._move_to(state["block"], state["batch"], tuple(state["carried"]))

    def _move_to(self, block, batch, carried):
        self._block, self._batch, self._carried = block, batch, carried
        self._rows = None

    def _pack_block(self):
        drawn = self._mixture.block(self._block)
        # Carried sentences come first and open the first rows, so that none is carried forever.
        sentences = np.concatenate([np.asarray(self._carried, np.int64), drawn])
        rows = self._packer.first_fit(sentences)
        opened = int(rows.max(initial=-1)) + 1
        self._batches_in_block = max(0, opened - _UNFINISHED_ROWS) // self._packer.batch_rows
        full = self._batches_in_block * self._packer.batch_rows
        self._left_over = tuple(sentences[rows >= full])
        # First-fit leaves the least filled rows at the end: spread the rows over the batches.
        order = permutation(full, self._block)
        self._sentences = sentences[rows < full]
        self._rows = np.argsort(order)[rows[rows < full]]


class Stream(Protocol):
    """An iterator whose position can be saved and restored."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class Prefetcher:
    """Returns the items of a stream, up to `depth` of them made in advance by one thread.

    The saved position is the position after the last item returned. Items made in advance do not
    count. An error of the stream is raised in place of the item that it prevented.
    """

    def __init__(self, stream: Stream, depth: int):
        """Takes over a stream, which nobody else may use; ValueError for a negative depth."""
        if depth < 0:
            raise UserError(f"input.prefetch_batches must be at least 0, not {depth}")
        self._stream = stream
        self._depth = depth
        self._state = stream.get_state()
        self._pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "prefetch") if depth else None

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._worker is None:
            item, self._state = self._make()
            return item
        # One more than the depth, since the first is returned now.
        while len(self._pending) <= self._depth:
            self._pending.append(self._worker.submit(self._make))
        item, self._state = self._pending.popleft().result()
        return item

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last item returned."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that `get_state` returned, and drops items made in advance."""
        self._discard()
        self._stream.set_state(state)
        self._state = self._stream.get_state()

    def close(self) -> None:
        """Stops the thread. The iterator must not be used afterwards."""
        self._discard()
        if self._worker is not None:
            self._worker.shutdown()

    def _make(self):
        item = next(self._stream)
        return item, self._stream.get_state()

    def _discard(self):
        for future in self._pending:
            future.cancel()
        concurrent.futures.wait(self._pending)
        self._pending.clear()
