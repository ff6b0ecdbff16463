"""NearDuplicates: finds rows whose texts differ in few places, by MinHash and banding.

The similarity of two rows is the Jaccard index of their sets of character n-grams, without case,
digits and punctuation. MinHash (Broder 1997, https://doi.org/10.1109/SEQUEN.1997.666900) makes
similar sets share values, and banding (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets,
section 3.4) puts rows with many common values into a common bucket. In each bucket the sets
themselves are compared. What becomes of a bucket depends on its rows alone, so buckets may be
worked on in any order and anywhere.

The hash of a part is a polynomial over its characters modulo 2**64, as in Karp and Rabin 1987
(https://doi.org/10.1147/rd.312.0249). Its coefficients are mixed code points. A running sum over
all texts then gives the hash of any part from two of its elements. Hashes do not depend on the
process, the platform or the texts beside it.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core import Configurable, Params
from lingvo_gshard.data import Row, held_out, splitmix64

_BASE = 0xD1342543DE82EF95
_INVERSE = pow(_BASE, -1, 1 << 64)


class TextHashes:
    """Hashes of parts of texts.

    Attributes:
      codes: uint32 [N], the code points of all texts, one text after the other.
      starts: int64 [n + 1], where each text begins in `codes`; the last element is N.
    """

    def __init__(self, texts: Sequence[str]):
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


DUPLICATE = "a duplicate"
NEAR_DUPLICATE = "a near duplicate"

# Share of near duplicates at the smallest similarity that share no bucket.
_MISSED = 0.01
_ROWS_AT_A_TIME = 4096
# Rows of a bucket that later ones are compared with. Boilerplate makes buckets of millions.
_COMPARED = 128
# Rows whose n-grams are kept, since candidates share several buckets.
_REMEMBERED = 1 << 16
_SEED = 0x6E656172


class NearDuplicates(Configurable):
    """Finds the rows that are similar to an earlier one of the same language."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "similarity",
            0.0,
            "Smallest Jaccard index of near duplicates, such as 0.8; 0: they are not looked for.",
            minimum=0,
            maximum=1,
        )
        p.define("characters", 5, "Length of the n-grams that are compared.", minimum=1)
        p.define(
            "hashes",
            64,
            "Number of MinHash values of a row. More find candidates more exactly and take longer.",
            minimum=8,
            maximum=1024,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self.is_on = self.p.similarity > 0
        self._characters = self.p.characters
        self._similarity = self.p.similarity
        self._band_rows = _band_rows(self.p.similarity, self.p.hashes) if self.is_on else 1
        self.bands_of_row = self.p.hashes // self._band_rows
        with np.errstate(over="ignore"):
            numbers = np.arange(2 * self.bands_of_row * self._band_rows, dtype=np.uint64)
            mixed = splitmix64(numbers + np.uint64(_SEED))
        self._factors, self._terms = mixed[::2] | np.uint64(1), mixed[1::2]

    def bands(self, rows: Sequence[Row]) -> np.ndarray:
        """Returns the keys of the buckets of each row, uint64 [n, bands].

        Rows with the same key in the same column are candidates, which `copies` compares. Some
        thousand rows at a time are fastest.
        """
        texts = [self._text(row) for row in rows]
        values = self._min_hashes(texts)
        keys = TextHashes([row.language for row in rows]).whole()[:, None]
        keys = np.repeat(keys, self.bands_of_row, axis=1)
        with np.errstate(over="ignore"):
            for column in range(self._band_rows):
                keys = splitmix64(keys ^ values[:, column :: self._band_rows])
        return keys

    def copies(self, rows: Iterable[Row]) -> list[int]:
        """Returns, in order, which rows of a bucket are near duplicates of an earlier one in it.

        Of any two near duplicates in a bucket, at most one is not named. Rows after the first 128
        that are not named are compared with those 128 only.
        """
        entries = ((index, row.language, self._grams(row)) for index, row in enumerate(rows))
        return self._copies(entries)

    def copies_among(self, rows: Sequence[Row]) -> list[int]:
        """Returns which rows are near duplicates of an earlier one, among rows of all buckets."""
        parts = [
            self.bands(rows[begin : begin + _ROWS_AT_A_TIME])
            for begin in range(0, len(rows), _ROWS_AT_A_TIME)
        ]
        grams = functools.lru_cache(maxsize=_REMEMBERED)(lambda index: self._grams(rows[index]))
        found = set()
        for keys in np.concatenate(parts).T if parts else ():
            for bucket in _buckets(keys):
                entries = ((index, rows[index].language, grams(index)) for index in bucket)
                found.update(self._copies(entries))
        return sorted(found)

    def _copies(self, entries: Iterable[tuple[int, str, frozenset[str]]]) -> list[int]:
        """Returns the numbers of the copies among (number, language, n-grams) in order."""
        named, kept = [], collections.defaultdict(list)
        for number, language, grams in entries:
            before = kept[language]
            if any(_jaccard(grams, other) >= self._similarity for other in before):
                named.append(number)
            elif len(before) < _COMPARED:
                before.append(grams)
        return named

    def _text(self, row: Row) -> str:
        text = f"{held_out.fold(row.source)}\n{held_out.fold(row.target)}"
        return text.ljust(self._characters)

    def _grams(self, row: Row) -> frozenset[str]:
        text, length = self._text(row), self._characters
        return frozenset(text[i : i + length] for i in range(len(text) - length + 1))

    def _min_hashes(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the smallest values of hash functions over the n-grams, uint64 [n, hashes]."""
        hashes = TextHashes(texts)
        counts = np.diff(hashes.starts) - self._characters + 1
        firsts = np.cumsum(counts) - counts
        begin = np.arange(counts.sum()) + np.repeat(hashes.starts[:-1] - firsts, counts)
        grams = hashes.of(begin, begin + self._characters)
        found = np.empty((len(texts), len(self._factors)), np.uint64)
        with np.errstate(over="ignore"):
            for column, (factor, term) in enumerate(zip(self._factors, self._terms, strict=True)):
                found[:, column] = np.minimum.reduceat(grams * factor + term, firsts)
        return found


def are_in(known: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Returns a bool for each hash: whether it is in `known`, which is sorted."""
    if not len(known):
        return np.zeros(hashes.shape, bool)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return known[places] == hashes


def runs(keys: np.ndarray) -> Iterator[tuple[int, int]]:
    """Returns (begin, end) of each run of equal keys in sorted ones; (0, 0) if there are none."""
    begins = np.flatnonzero(np.diff(keys)) + 1
    return itertools.pairwise([0, *begins.tolist(), len(keys)])


def _band_rows(similarity: float, hashes: int) -> int:
    """Returns the largest number of values in a key that misses few near duplicates."""
    sizes = range(1, hashes + 1)
    fine = [r for r in sizes if (1 - similarity**r) ** (hashes // r) <= _MISSED]
    return max(fine, default=1)


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def _buckets(keys: np.ndarray) -> Iterator[list[int]]:
    """Yields the indices of each key that occurs more than once, in order."""
    order = np.argsort(keys, kind="stable")
    for begin, end in runs(keys[order]):
        if end - begin > 1:
            yield order[begin:end].tolist()
