# tests: wings/planning/loads/layers.py, wings/planning/loads/file.py
"""Tests the rows that a plan says are dropped against those that a step drops on a mesh."""

import pytest
import tensorflow as tf

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.planning.loads.file import LayerRecords
from lingvo_gshard.wings.planning.loads.layers import expert_layers
from lingvo_gshard.wings.services.routers.counts import records_of, watch_routers, watched_layers
from tests.runtime import tiny_translation


@pytest.mark.parametrize("exchange", ["fixed", "gathered"])
@pytest.mark.slow
def test_rows_over_a_bound_are_those_that_the_mesh_drops(exchange):
    dispatch = DroplessDispatch.params().set(bound=0.6, over_bound="drop", exchange=exchange)
    trainer = tiny_translation.trainer(stack_values={"moe.dispatch": dispatch})
    partitioning = Partitioning.make("fsdp=2,data=4", "expert_fsdp")
    runtime = SpmdRuntime(trainer, partitioning, devices_for(8))
    runtime.init_state()
    batch = tiny_translation.batch(3)
    sums = watch_routers(runtime, trainer, batch, None, 1)()
    records = records_of(1, sums, watched_layers(trainer.task), None)
    metrics = runtime.train_step(batch).read()
    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
    layers = expert_layers(trainer, specs, partitioning)
    assert [layer.path for layer in layers] == [record.layer for record in records]
    for layer, record in zip(layers, records, strict=True):
        placement = layer.devices.contiguous()
        dropped = LayerRecords(layer, [record]).dropped(placement)
        assert dropped is not None and dropped[0] > 0
        expected = metrics[f"{layer.path}/over_bound_share"]
        assert dropped[0] / sum(record.choices) == pytest.approx(expected, abs=1e-6)
        enough = LayerRecords(layer, [record]).sufficient_bound(placement)
        assert enough is not None and enough[0] > layer.bound
