"""Synthetic batches: rows full of sentences of random words, for benchmarks that read no data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import UserError, known_sizes, tf

# Positions of a sentence: about the mean of the embedded corpus.
SENTENCE = 16
# Smaller ids are reserved for padding, sentence ends and unknown words.
_FIRST_WORD = 4


def make_array(
    name: str, shape: Sequence[int], dtype: np.dtype | str, num_ids: int | None
) -> np.ndarray:
    """Returns the array of a synthetic batch, the same for the same arguments.

    Args:
      name: name of the array. `*segments` number the sentences of a row, `*positions` count
        within each; other arrays are random: ids if they are integers, normal values if not.
      shape: shape of the array; sentences follow one another along the last dimension.
      num_ids: number of valid ids of an array of ids.

    Raises:
      UserError: `num_ids` is None for an array of integers.
    """
    dtype = np.dtype(dtype)
    place = np.broadcast_to(np.arange(shape[-1] if shape else 1), shape)
    if name.endswith("segments"):
        return (place // SENTENCE + 1).astype(dtype)
    if name.endswith("positions"):
        return (place % SENTENCE).astype(dtype)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if not np.issubdtype(dtype, np.integer):
        return rng.normal(size=shape).astype(dtype)
    if num_ids is None:
        raise UserError(f"the task gives no range of valid ids for {name}; see Task.id_ranges")
    return rng.integers(min(_FIRST_WORD, num_ids - 1), num_ids, shape).astype(dtype)


def make_batch(
    specs: Mapping[str, tf.TensorSpec], id_ranges: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Returns a batch of rows that are full of random sentences; raises what `make_array` does."""
    batch = {}
    for name, spec in specs.items():
        dtype = np.dtype(spec.dtype.as_numpy_dtype)
        batch[name] = make_array(name, known_sizes(spec.shape), dtype, id_ranges.get(name))
    return batch
