"""Tests rearrangements against explicit loops."""

import numpy as np

from lingvo_gshard.open_models.table import Rearrangement


def test_merged_dimensions_are_split_and_permuted():
    found = Rearrangement("(ND)M->MND")
    sizes = {"M": 3, "N": 2, "D": 5}
    assert found.published_shape(sizes) == (10, 3)
    published = np.arange(30.0).reshape(10, 3)
    weight = found.apply(published, sizes)
    for m in range(3):
        for n in range(2):
            for d in range(5):
                assert weight[m, n, d] == published[n * 5 + d, m]
    back = np.zeros_like(published)
    found.invert(weight, back, sizes)
    assert np.array_equal(back, published)


def test_a_tensor_can_hold_several_weights():
    sizes = {"E": 2, "M": 3, "H": 4}
    published = np.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    back = np.zeros_like(published)
    for index in range(2):
        found = Rearrangement("EM(Hg)->EMH", (("g", index, 2),))
        assert found.published_shape(sizes) == (2, 3, 8)
        weight = found.apply(published, sizes)
        assert np.array_equal(weight, published[:, :, index::2])
        found.invert(weight, back, sizes)
    assert np.array_equal(back, published)


def test_a_tensor_can_be_a_concatenation_of_weights():
    published = np.arange(2 * 7 * 3.0).reshape(14, 3)
    back, parts = np.zeros_like(published), []
    for start, size in ((0, 4), (4, 3)):
        found = Rearrangement("(ND)r->rND", joined=("D", start, 7))
        sizes = {"N": 2, "D": size, "r": 3}
        assert found.published_shape(sizes) == (14, 3)
        parts.append(found.apply(published, sizes))
        found.invert(parts[-1], back, sizes)
    assert np.array_equal(back, published)
    for n in range(2):
        for d in range(7):
            part, at = (parts[0], d) if d < 4 else (parts[1], d - 4)
            assert np.array_equal(part[:, n, at], published[n * 7 + d])
