"""Tests the layers with experts of a planned step against what the step's routers report."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import Top2Router
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.planning.loads.layers import expert_layers
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from lingvo_gshard.wings.services.routers.counts import (
    RoutingSums,
    records_of,
    watched_batch,
    watched_layers,
)
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation

CASES = {
    "lingvo's capacity": ({"moe.router": Top2Router.params().set(mode="lingvo")}, {}),
    "dropless loop": (
        {"num_layers": 4, "execution": loop(), "moe.dispatch": DroplessDispatch.params()},
        {},
    ),
    "expert choice in micro-batches": (
        {"moe.router": ExpertChoiceRouter.params().set(allow_causal=True)},
        {"micro_batches": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_groups_and_capacities_are_those_that_routers_report(name):
    stacks, values = CASES[name]
    trainer = tiny_translation.trainer(group_size=16, stack_values=stacks, **values)
    batch = tiny_translation.batch(1)
    specs = {key: tf.TensorSpec(x.shape, x.dtype) for key, x in batch.items()}
    partitioning = Partitioning.make("data=4,model=2", "expert_tensor")
    found = expert_layers(trainer, specs, partitioning)
    sizes, fed = watched_batch(batch, None, 1)
    traced = tf.function(RoutingSums(trainer, sizes), autograph=False)
    fed = {key: tf.constant(x) for key, x in fed.items()}
    sums = {key: x.numpy() for key, x in traced(trainer.task.init(1), fed).items()}
    records = records_of(1, sums, watched_layers(trainer.task), None)
    assert [layer.path for layer in found] == [record.layer for record in records]
    for layer, record in zip(found, records, strict=True):
        assert layer.groups * layer.micro_batches == record.groups == 6
        assert (layer.group_size, layer.capacity) == (record.group_size, record.capacity)
        assert layer.router == record.router and layer.num_experts == record.num_experts
        assert layer.limits == (name == "lingvo's capacity")
        assert layer.is_dropless == (name == "dropless loop")
        assert layer.times == (2 if name == "dropless loop" else 1)
        assert (layer.devices.parts, layer.devices.slices) == (4, 1)
        factor = layer.capacity_factor(7)
        even = layer.group_size * layer.experts_per_token / layer.num_experts
        assert int(even * factor) == 7 and factor == pytest.approx(7 / even, abs=1e-4)
    if name == "dropless loop":
        body = "encoder/layers/body_1/feed_forward"
        assert [layer.scope for layer in found[:2]] == [body] * 2


def test_a_dense_model_has_none():
    trainer = tiny_translation.trainer(stack_values={"moe": FeedForward.params()})
    assert expert_layers(trainer, {}, Partitioning.make("data=4", "expert")) == []


def test_devices_of_experts_that_do_not_divide_evenly():
    trainer = tiny_translation.trainer(num_experts=6)
    batch = tiny_translation.batch(1)
    specs = {key: tf.TensorSpec(x.shape, x.dtype) for key, x in batch.items()}
    (layer, _) = expert_layers(trainer, specs, Partitioning.make("data=4", "expert"))
    expected = [[0, 1], [2, 3], [4, 5], [-1, -1]]
    np.testing.assert_array_equal(layer.devices.contiguous(), expected)
    # 8 rows of 12 tokens in groups of 12, each with 2 experts of 6.
    assert (layer.groups, layer.group_size, layer.capacity) == (8, 12, 4)
    assert layer.path == "encoder.layers[1].feed_forward" and layer.limits
    assert layer.scope == "encoder/layers_1/feed_forward"
