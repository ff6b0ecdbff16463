# tests: training/run/checkpoint/arrays.py
"""Checks that digests do not depend on sharding and change whenever an array changes."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lingvo_gshard.training.run.checkpoint.arrays import MODULUS, digest

IN_JAX = (np.float32, np.int8, np.bool_, np.uint16, np.complex64, ml_dtypes.bfloat16)


def one_by_one(array: np.ndarray) -> int:
    """Returns the digest by its definition, word by word."""
    content, width = array.tobytes(), min(array.dtype.itemsize, 4)
    words = [content[at : at + width] for at in range(0, len(content), width)]
    return sum(int.from_bytes(w, "little") * (2 * i + 1) for i, w in enumerate(words)) % MODULUS


@given(
    st.sampled_from((*IN_JAX[:-1], np.float64, np.int64, np.complex128)).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=5))
    )
)
def test_digest_matches_its_definition(array):
    assert digest(array) == one_by_one(array)


def test_digest_of_long_rows_and_many_rows():
    """The array has more words than one block."""
    generator = np.random.default_rng(0)
    for shape in ((200_001,), (3, 70_000), (70_000, 3)):
        array = generator.integers(0, 2**32, shape, np.uint32)
        expected = np.dot(array.reshape(-1).astype(object), 2 * np.arange(array.size) + 1) % MODULUS
        assert digest(array) == expected


@pytest.mark.parametrize("dtype", IN_JAX)
@pytest.mark.parametrize(
    "split",
    [(), ("a",), (None, "a"), (None, None, "a"), ("a", None, "b"), (("a", "b"),), ("b", "a")],
)
def test_shard_digests_add_up_to_the_arrays(dtype, split):
    """Replicated shards count once."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    array = (np.random.default_rng(1).normal(size=(8, 12, 8)) * 40).astype(dtype)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*split))
    partitioning = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    assert digest(partitioning) == digest(array) == one_by_one(array)


def test_flipped_bits_and_swaps_change_the_digest():
    array = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    expected = digest(array)
    words = array.view(np.uint32)
    for bit in range(32):
        for place in np.ndindex(words.shape):
            words[place] ^= np.uint32(1 << bit)
            assert digest(array) != expected
            words[place] ^= np.uint32(1 << bit)
    assert digest(array) == expected
    assert digest(array[::-1]) != expected


def test_array_that_another_process_counts_has_digest_zero():
    array = np.arange(6.0)
    assert digest(array, counts=False) == 0 != digest(array)
