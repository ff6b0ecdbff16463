# tests: wings/verification/patterns.py, wings/verification/rules.py
# tests: wings/verification/operations.py
"""Tests that the cause of each planted defect is named, forward and in a gradient alone."""

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.sharding.manual import manual
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.verification.patterns import Pair, added_again, other_slices
from tests.verification import planted

# Defect -> what its cause says, whatever the mesh.
CAUSES = {
    planted.sum_is_missing: ("along data hold", "their sum is the whole", "over data (psum)"),
    planted.sum_is_missing_in_rows: ("along model hold", "their sum is the whole", "over model"),
    planted.mean_is_missing: ("along data hold", "their mean is the whole: a mean over data"),
    planted.sum_over_the_wrong_axis: ("summed over data where a sum over model (psum) is meant",),
    planted.summed_over_one_of_two_axes: ("along model hold", "a sum over model (psum) is missing"),
    planted.maximum_is_missing: ("along data hold", "the largest over data is missing"),
    planted.summed_twice: ("summed twice, over data",),
    planted.averaged: ("averaged where it should be summed, or a sum is missing, over model",),
    planted.divided_by_local_root: ("root of the number of devices", "over data"),
    planted.mean_of_means: ("RealDiv at planted.py", "a mean of the devices' means", "over data"),
    planted.mean_of_means_of_all: ("DivNoNan at planted.py", "devices' means", "over model"),
    planted.mean_of_means_by_a_gate: ("RealDiv at planted.py", "devices' means", "over data"),
    planted.axes_swapped: ("along model and data, the shards", "(swapped axes)"),
    planted.dimensions_swapped: ("dimensions are swapped in a reshape", "data, the slices"),
    planted.joined_along_another_dimension: ("joined along another dimension than they are cut",),
    planted.gathered_interleaved: ("along model, the slices of the shards are interleaved",),
    planted.gathered_from_the_first: ("every shard is a copy of shard 0: a gather", "along data"),
    planted.gathered_from_the_next: ("shards are right and stand at other", "gathered from"),
    planted.gathered_a_row_off: ("index 0 has the slice of index 1. A gather, slice",),
    planted.reversed_in_shards: ("a sort, reverse, roll or shuffle sees one shard", "along data"),
    planted.sorted_in_shards: ("a sort, reverse or gather along it sees one shard", "dimension 0"),
    planted.masked_by_position_in_shard: ("only the", "positions", "mask", "along data"),
    planted.position_in_shard_added: ("positions are counted within the shard", "along data"),
    planted.sine_of_position_in_shard: ("first shard along data is right", "own positions"),
    planted.running_sum_without_carry: ("a running sum (cumsum) lacks their carry", "along data"),
    planted.running_sum_from_the_end: ("the sum of later shards: a running sum", "along model"),
    planted.running_product_without_carry: ("a running product or state lacks the carry of",),
    planted.softmax_of_shard: ("normalized (softmax, norm, mean) by one shard", "along model"),
    planted.norm_of_shard: ("normalized (softmax, norm, mean) by one shard", "along data"),
    planted.batch_norm_of_shard: ("by the mean and the norm of one shard", "along data"),
    planted.mean_of_shard_subtracted: ("a mean or a maximum of one shard", "along model"),
    planted.tail_is_dropped: ("zeros stand for shard", "(tail)", "along data"),
    planted.only_the_first_shard: ("zeros stand for shard 1", "shard 0 is right", "along data"),
    planted.only_the_first_shard_summed: ("StridedSlice", "joins the parts", "psum is meant"),
    planted.maximum_for_sum: ("Max", "joins the parts of devices along data: psum is meant"),
    planted.summed_in_bfloat16: ("the size of rounding in bfloat16",),
    planted.accumulated_in_float16: ("the size of rounding in float16",),
    planted.another_key_on_each_device: ("along model hold", "only the first device's", "random"),
    planted.one_key_for_all_rows: ("first shard along data is right", "a random key"),
    planted.bias_added_by_each_device: ("such as a bias", "counts once for each device"),
    planted.neighbors_are_missing: ("only the borders between shards", "along data"),
    planted.logarithm_of_nothing: ("it is not finite where the whole one is",),
}
# No value tells where a sum lacks parts. The axis and nothing else is named.
UNKNOWN = {
    planted.tail_is_not_summed: "Over data alone it differs, too, but not over model alone",
    planted.square_before_sum: "Over data alone it differs, too, but not over model alone",
}
BACKWARD = "only the backward pass is wrong, the forward pass is equal: "
# Shapes and results that are not finite have no gradient of their own here.
NO_GRADIENT = (planted.joined_along_another_dimension,)


def name(defect):
    return defect.__name__


@pytest.mark.parametrize("defect", CAUSES, ids=name)
def test_a_cause_is_named(defect):
    check(defect, "data=4,model=2", CAUSES[defect])


@pytest.mark.slow
@pytest.mark.parametrize("defect", CAUSES, ids=name)
def test_a_cause_is_named_on_other_meshes(defect):
    check(defect, "data=2,model=4", CAUSES[defect])
    check(defect, "model=2,data=2", CAUSES[defect])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=2,model=4"])
@pytest.mark.parametrize("defect", [d for d in CAUSES if d not in NO_GRADIENT], ids=name)
def test_the_cause_of_a_gradient_alone_is_named(defect, mesh):
    check(planted.gradient_alone(defect), mesh, (BACKWARD, *CAUSES[defect]))


@pytest.mark.parametrize("defect", UNKNOWN, ids=name)
def test_evidence_is_stated_where_no_cause_is_known(defect):
    found = check(defect, "data=4,model=2", (UNKNOWN[defect],))
    assert found.likely.startswith("the values are no multiple, order, shift or part"), found.likely
    found = check(planted.gradient_alone(defect), "data=2,model=4", (UNKNOWN[defect],))
    assert found.likely.startswith(f"{BACKWARD}the values are no multiple"), found.likely


def check(function, mesh, parts):
    """Returns the finding after a check that its cause has all parts of a sentence."""
    found = lingvo_gshard.verify(function, [planted.X], mesh=mesh).first
    assert found is not None
    for part in parts:
        assert part in found.likely, (part, found.likely)
    return found


def test_a_gradient_without_its_forward_pass_is_called_a_result():
    def gradient(x):
        return planted.gradient_alone(planted.summed_twice)(x)[1]

    found = check(gradient, "data=4,model=2", ("it is 4 times the whole one",))
    assert not found.likely.startswith(BACKWARD)


def test_one_wrong_element_has_no_cause():
    def defect(x):
        def on_device(x):
            off = tf.scatter_nd([[0, 5]], [1.0], x.shape) if planted.devices("model") > 1 else 0.0
            return x + off

        return manual(on_device, [planted.WHOLE], planted.WHOLE)(x)

    found = check(defect, "data=2,model=2", ("Over model alone it differs, too",))
    assert found.likely.startswith("the values are no multiple, order, shift or part")


def pair(wrong, right, split=None):
    return Pair.of(wrong, right, split, Mesh((("data", 2), ("model", 2))))


def test_equal_slices_tell_no_order():
    # Both 1s of the right tensor can be meant.
    assert not other_slices(pair(np.array([1.0, 0, 1, 0]), np.array([1.0, 1, 0, 0])))


def test_a_tensor_that_is_the_same_along_a_dimension_tells_nothing_about_it():
    right = np.ones((4, 3)) * np.arange(1.0, 4)
    assert not added_again(pair(right + 1, right)).count("dimension 0")
