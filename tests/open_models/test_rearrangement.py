# tests: wings/open_models/table.py
"""Tests rearrangements against explicit loops."""

import numpy as np

from lingvo_gshard.wings.open_models.table import Rearrangement


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


def test_weights_of_other_layouts_can_be_one_tensor():
    """Whole dimensions one after the other: two times N x D, then N x r x d."""
    published = np.arange(2 * 3 + 2 * 4 * 5.0).reshape(-1, 1)
    back = np.zeros_like(published)
    first = Rearrangement("(ND)o->ND", (("o", 0, 1),)).joined_at("N", 0, 46)
    then = Rearrangement("(Nrd)o->Nrd", (("o", 0, 1),)).joined_at("N", 6, 46)
    sizes = {"N": 2, "D": 3}, {"N": 2, "r": 4, "d": 5}
    assert first.extent("N", sizes[0]) == 6 and then.extent("N", sizes[1]) == 40
    parts = [each.apply(published, of) for each, of in zip((first, then), sizes, strict=True)]
    np.testing.assert_array_equal(parts[0].ravel(), np.arange(6))
    np.testing.assert_array_equal(parts[1].ravel(), np.arange(6, 46))
    for each, part, of in zip((first, then), parts, sizes, strict=True):
        assert each.published_shape(of) == published.shape
        each.invert(part, back, of)
    np.testing.assert_array_equal(back, published)


def test_a_weight_without_the_joined_letter_has_one_index_of_it():
    published = np.arange(2 * 4 * 3.0).reshape(24, 1)
    key = Rearrangement("(NrD)M->MND").joined_at("r", 1, 4)
    value = Rearrangement("(NrD)M->MNrD").joined_at("r", 2, 4)
    sizes = {"N": 2, "D": 3, "M": 1}
    assert key.extent("r", sizes) == 1
    by_letter = published.reshape(2, 4, 3)
    np.testing.assert_array_equal(key.apply(published, sizes)[0], by_letter[:, 1])
    np.testing.assert_array_equal(value.apply(published, sizes | {"r": 2})[0], by_letter[:, 2:])
