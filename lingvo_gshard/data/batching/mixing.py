"""Mixture: the endless order of training sentences, with languages sampled by temperature.

A block of this stream is a function of the seed and the block's number. So any block is computed
without those before it, and resuming replays no random generator.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching.permutations import permutation

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
