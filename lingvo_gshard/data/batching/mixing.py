"""Which sentence is trained on next: languages by temperature, each in fresh random order.

Everything here is a formula of (seed, block number), so that any block of the endless stream can be
computed without the ones before it; no generator is kept that would have to be replayed on resume.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

_UNITS = 1 << 32


def temperature_probabilities(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Returns p_l ~ n_l ** (1 / temperature), one per language, summing to 1.

    Temperature 1 keeps the data's proportions; infinity makes all languages equal.
    Source: Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019.
    Raises ValueError for a temperature below 1 or a count below 1.
    """
    if not temperature >= 1:
        raise ValueError(f"temperature must be at least 1, not {temperature}")
    counts = np.asarray(counts, np.float64)
    if counts.size == 0 or counts.min() < 1:
        raise ValueError("Every language needs at least one sentence to be sampled from")
    # Through logarithms of shares, so that a tiny temperature exponent cannot overflow.
    weights = np.exp(np.log(counts / counts.max()) / temperature)
    return weights / weights.sum()


def permutation(size: int, *key: int) -> np.ndarray:
    """Returns a pseudo-random permutation of range(size) that depends on `key` alone.

    Sorts by splitmix64 hashes (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195), whose
    values no library version can change: a resumed run needs the same order for ever.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for part in key:
            state = _splitmix64(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
        hashes = _splitmix64(np.arange(size, dtype=np.uint64) * _GOLDEN + state)
    return np.argsort(hashes, kind="stable")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(x):
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Mixture:
    """An endless stream of sentence numbers, cut into blocks of about `block_size`.

    Language l takes its share p_l of every block (to within one sentence, and exactly in the long
    run), and goes through all its sentences in a new random order before it repeats one.
    """

    def __init__(
        self,
        members: Mapping[str, np.ndarray],
        temperature: float,
        block_size: int,
        seed: int,
    ):
        """Takes the sentence numbers of each language; see `temperature_probabilities`."""
        self._languages = sorted(members)
        self._members = [np.asarray(members[language]) for language in self._languages]
        self.probabilities = temperature_probabilities([len(m) for m in self._members], temperature)
        # Whole units, so that positions far into the stream are exact.
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
        # Phases spread out the blocks in which small languages take their one sentence.
        phase = (2 * int(self._phases[index]) + 1) * _UNITS // (2 * len(self._units))
        before = block * self._block_size * self._units[index]
        return (before + phase) // _UNITS

    def _epoch_order(self, index: int, epoch: int) -> np.ndarray:
        return permutation(len(self._members[index]), self._seed, 3, index, epoch)
