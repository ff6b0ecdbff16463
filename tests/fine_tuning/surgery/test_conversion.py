"""Tests the conversion of weights between loops, pipeline stages and separate layers."""

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.wings.fine_tuning.surgery import conversion
from tests.fine_tuning.surgery import tiny_stacks
from tests.layers.stacks import executions

# Four layers as one loop, and as pipeline stages with two chunks of one layer each.
LOOP = {"execution": executions.loop()}
STAGES = {"execution": executions.pipeline(2, circulations=2)}


def trainer(**values):
    """Returns a trainer of four layers, separate or in loops."""
    params = tiny_stacks.dense()
    for stack in (params.encoder, params.decoder):
        stack.set(num_layers=4, **values)
    return tiny_stacks.trainer(params)


def trainers():
    """Returns a trainer of four separate layers, and one of the same layers in loops."""
    return [trainer(), trainer(**LOOP)]


def finder(arrays):
    def find(name, layout, shape):
        assert len(layout) == len(shape) == arrays[name].ndim
        assert arrays[name].shape == shape
        return arrays[name]

    return find


def test_loops_and_separate_layers_convert_both_ways():
    plain, loop = trainers()
    theta, moments = tiny_stacks.arrays(loop)
    specs = loop.state_specs()
    weights, layer_moments = (
        conversion.by_name(specs.theta, theta),
        conversion.by_name(specs.moments, moments),
    )
    name = "encoder.layers[3].feed_forward.w_in"
    stacked = "encoder.layers.body[1].feed_forward.w_in"
    np.testing.assert_array_equal(weights[name], theta[stacked][1])
    np.testing.assert_array_equal(
        layer_moments[f"{name}.first_moment"], moments[f"{stacked}.first_moment"][1]
    )
    there = conversion.of_trainer(plain, finder(weights), finder(layer_moments))
    assert set(dict(there.theta.flatten_items())) == set(weights)
    back = conversion.of_trainer(loop, finder(weights), finder(layer_moments))
    for tree, arrays in ((back.theta, theta), (back.moments, moments)):
        for path, array in tree.flatten_items():
            np.testing.assert_array_equal(array, arrays[path])


def test_loops_and_pipeline_stages_convert_both_ways():
    loop, stages = trainer(moe_every=1, **LOOP), trainer(moe_every=1, **STAGES)
    theta, moments = tiny_stacks.arrays(stages)
    specs = stages.state_specs()
    weights, layer_moments = (
        conversion.by_name(specs.theta, theta),
        conversion.by_name(specs.moments, moments),
    )
    w_in = "encoder.layers.body[0].feed_forward.w_in"
    # The second chunk of the first stage is the third layer.
    assert specs.theta.encoder.layers.body[0].feed_forward.w_in.layout == "PRMH"
    layer = weights["encoder.layers[2].feed_forward.w_in"]
    np.testing.assert_array_equal(layer, theta[w_in][0, 1])
    there = conversion.of_trainer(loop, finder(weights), finder(layer_moments))
    np.testing.assert_array_equal(dict(there.theta.flatten_items())[w_in][2], layer)
    back = conversion.of_trainer(stages, finder(weights), finder(layer_moments))
    for tree, arrays in ((back.theta, theta), (back.moments, moments)):
        for path, array in tree.flatten_items():
            np.testing.assert_array_equal(array, arrays[path])


@pytest.mark.parametrize("index", [0, 1])
def test_missing_weights_keep_their_initial_values(index):
    trainer = trainers()[index]
    state: NestedMap = conversion.of_trainer(trainer, lambda *_: None, lambda *_: None)
    expected = trainer.init_state()
    for item in ("theta", "moments"):
        pairs = zip(state[item].flatten_items(), expected[item].flatten(), strict=True)
        for (path, array), value in pairs:
            np.testing.assert_array_equal(array, value.numpy(), path)
