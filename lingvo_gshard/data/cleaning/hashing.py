"""Hashes of parts of texts, computed for many texts at once.

The hash of a part is a polynomial over its characters modulo 2**64, as in Karp and Rabin 1987
(https://doi.org/10.1147/rd.312.0249). Its coefficients are mixed code points. A running sum over
all texts then gives the hash of any part from two of its elements. Hashes do not depend on the
process, the platform or the texts beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.data.batching.permutations import splitmix64

_BASE = 0xD1342543DE82EF95
_INVERSE = pow(_BASE, -1, 1 << 64)


class TextHashes:
    """Hashes of parts of texts.

    Attributes:
      codes: uint32 [N], the code points of all texts, one text after the other.
      starts: int64 [n + 1], where each text begins in `codes`; the last element is N.
    """

    def __init__(self, texts: Sequence[str]):
        """Prepares the hashes of texts.

        Args:
          texts: n texts.
        """
        # Lone surrogates cannot be encoded otherwise.
        joined = "".join(texts).encode("utf-32-le", "surrogatepass")
        self.codes = np.frombuffer(joined, np.uint32)
        self.starts = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=self.starts[1:])
        rounded = 1 << max(10, int(len(self.codes)).bit_length())
        self._inverses = _powers(_INVERSE, rounded)
        with np.errstate(over="ignore"):
            terms = (
                splitmix64(self.codes.astype(np.uint64))
                * _powers(_BASE, rounded)[: len(self.codes)]
            )
            self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])

    def of(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the hash of each part, uint64 [P]. Equal parts have equal hashes.

        Args:
          begin: int64 [P], where parts begin in `codes`.
          end: int64 [P], where they end.
        """
        with np.errstate(over="ignore"):
            return splitmix64((self._sums[end] - self._sums[begin]) * self._inverses[begin])

    def whole(self) -> np.ndarray:
        """Returns the hash of each text, uint64 [n]."""
        return self.of(self.starts[:-1], self.starts[1:])


@functools.lru_cache(maxsize=8)
def _powers(base: int, count: int) -> np.ndarray:
    """Returns base ** 0, base ** 1, ... modulo 2**64, uint64 [count]."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(factors, dtype=np.uint64)
