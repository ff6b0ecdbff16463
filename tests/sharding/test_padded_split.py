# tests: sharding/partitioning.py
"""Checks how a state is split that the devices do not divide."""

import pytest

from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.sharding.partitioning import MASTERS, Partitioning


def spec(layout: str, shape: tuple[int, ...]) -> VariableSpec:
    return VariableSpec("w", layout, shape, "float32", constant(0))


def test_48_replicas_store_a_48th():
    partitioning = Partitioning.make("data=48", "zero1").with_padded_state()
    weight = spec("MH", (4096, 16384))
    for kind in ("moments", MASTERS):
        split = partitioning.spec_storage_split(weight, kind)
        assert partitioning.stored_shape(weight.shape, split) == (4128, 16384)
        assert split == (("data",), ())
    assert partitioning.spec_storage_split(weight) == ((), ())


@pytest.mark.parametrize(("size", "stored"), [(96, 96), (90, 96), (50, 50), (8, 8)])
def test_padding_is_small(size, stored):
    partitioning = Partitioning.make("data=48", "fsdp").with_padded_state()
    split = partitioning.spec_storage_split(spec("M", (size,)))
    assert partitioning.stored_shape((size,), split) == (stored,)


def test_without_padding_a_dimension_is_stored_whole():
    partitioning = Partitioning.make("data=48", "zero1")
    weight = spec("MH", (4096, 16384))
    assert partitioning.spec_storage_split(weight, "moments") == ((), ())
    assert partitioning.kind_of_masters("MH", weight.shape) == "weights"


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("zero1", "moments"),
        ("data", "weights"),
        ("fsdp", "weights"),
        ("activations: B->data | weights: M->data | moments: M->none", "weights"),
    ],
)
def test_masters_are_split_like_the_finer_of_weights_and_moments(strategy, kind):
    partitioning = Partitioning.make("data=8", strategy)
    assert partitioning.kind_of_masters("MH", (64, 64)) == kind
    assert partitioning.spec_split(spec("MH", (64, 64)), MASTERS) == partitioning.spec_split(
        spec("MH", (64, 64)), kind
    )
