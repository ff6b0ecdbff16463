# tests: sharding/xla.py
"""Compares tilings of numbered devices with the splits that they stand for."""

import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard import testing
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.xla import split_of_tiling, tiling

MESH = Mesh.parse("data=2,model=4")


def sets_of(split):
    """Returns the devices of each part, in ascending order."""
    return np.sort(tiling(split, MESH), axis=-1)


def splits_into(sizes):
    """Yields each split of dimensions into these numbers of parts."""
    orders = [o for n in range(3) for o in itertools.permutations(MESH.names, n)]
    for split in itertools.product(orders, repeat=len(sizes)):
        used = [axis for axes in split for axis in axes]
        if len(used) == len(set(used)) and tuple(map(MESH.parts, split)) == sizes:
            yield split


class TilingsTest(testing.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.permutations(["data", "model", ""]), st.integers(0, 2))
    def test_every_split_has_a_distinct_tiling(self, order, rank):
        split = tuple((axis,) if axis else () for axis in order[: rank + 1])
        devices = sets_of(split)
        sizes = devices.shape[:-1]
        same = [found for found in splits_into(sizes) if np.array_equal(sets_of(found), devices)]
        self.assertEqual(same, [split])
        self.assertEqual(split_of_tiling(tiling(split, MESH), len(split), MESH), split)

    def test_a_tiling_of_other_devices_is_no_split(self):
        self.assertIsNone(split_of_tiling(np.arange(4).reshape(4, 1), 1, MESH))
        self.assertIsNone(
            split_of_tiling(np.array([1, 0, 2, 3, 4, 5, 6, 7]).reshape(8, 1), 1, MESH)
        )


if __name__ == "__main__":
    testing.main()
