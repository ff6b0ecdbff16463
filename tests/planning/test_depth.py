# tests: wings/planning/generation.py
"""Extrapolates plans from two depths to all layers."""

import dataclasses

import msgspec
import pytest

from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.wings.planning.generation import Depths
from tests.planning.example_plan import as_plan, example_plan


def stack(**values):
    return TransformerStack.params().set(**({"moe_every": 0} | values))


@pytest.mark.parametrize(
    ("values", "depths"),
    [
        ({"num_layers": 32}, (1, 2)),
        ({"num_layers": 2}, None),
        ({"num_layers": 12, "moe_every": 2}, (2, 4)),
        ({"num_layers": 61, "moe_every": 1, "dense_first": 3}, (4, 5)),
        # One of six attentions is full; 26 layers are two more than four periods.
        ({"num_layers": 26, "sequential_first": 2, "period": 6}, (8, 14)),
        ({"num_layers": 8, "period": 2, "moe_every": 3}, None),
        ({"num_layers": 14, "sequential_first": 2, "period": 2, "moe_every": 3}, None),
        ({"num_layers": 18, "period": 2, "moe_every": 3}, (6, 12)),
    ],
)
def test_depths_hold_the_first_layers_and_whole_periods(values, depths):
    period = values.pop("period", 0)
    params = stack(**values, attention_pattern=(SelfAttention.params(),) * period)
    found = Depths.of(params)
    assert (found and (found.shallow, found.deeper)) == depths
    assert found is None or found.layers == params.num_layers


@pytest.mark.parametrize(
    ("values", "least", "depths"),
    [
        ({"num_layers": 32, "moe_every": 0}, 10, (10, 11)),
        ({"num_layers": 12, "moe_every": 2}, 5, (6, 8)),
        ({"num_layers": 61, "moe_every": 1, "dense_first": 3}, 4, (4, 5)),
        ({"num_layers": 61, "moe_every": 1, "dense_first": 3}, 8, (8, 9)),
        ({"num_layers": 12, "moe_every": 0}, 11, None),
    ],
)
def test_depths_have_the_layers_that_are_asked_for(values, least, depths):
    found = Depths.of(stack(**values), least)
    assert (found and (found.shallow, found.deeper)) == depths


def test_a_plan_is_linear_in_the_layers():
    deeper = as_plan(example_plan())
    sizes = deeper.bytes_per_device
    layer = deeper.layers[0]
    first = msgspec.structs.replace(
        deeper,
        seconds_per_step=deeper.seconds_per_step - 0.25,
        bytes_per_device=msgspec.structs.replace(sizes, peak=sizes.peak - 1000),
        # The second plan has an operation more, whose row the first lacks.
        layers=[*deeper.layers[1:2], msgspec.structs.replace(layer, seconds=layer.seconds - 0.5)],
    )
    found = Depths(shallow=1, deeper=2, layers=10).extrapolated(first, deeper)
    assert found.seconds_per_step == pytest.approx(first.seconds_per_step + 9 * 0.25)
    assert found.bytes_per_device.peak == first.bytes_per_device.peak + 9000
    assert found.bytes_per_device.weights == sizes.weights and found.devices == deeper.devices
    rows = {(row.layer, row.phase, row.times): row for row in found.layers}
    assert rows[layer.layer, layer.phase, layer.times].seconds == pytest.approx(
        layer.seconds + 8 * 0.5
    )
    assert len(found.layers) == len(deeper.layers)
    # The first program lacks this one: it has none of its time.
    new = deeper.layers[-1]
    assert rows[new.layer, new.phase, new.times].seconds == pytest.approx(9 * new.seconds)
    assert sum(row.share for row in found.collectives) == pytest.approx(1)
    assert found.tokens_per_second == pytest.approx(
        (deeper.tokens_per_step or 0) / found.seconds_per_step
    )
    assert found.mfu == pytest.approx(
        (deeper.mfu or 0) * deeper.seconds_per_step / found.seconds_per_step
    )
    assert found.notes[0] == "extrapolated to 10 layers from programs of 1 and of 2 layers"


def test_what_does_not_fit_when_all_layers_are_there_does_not_fit():
    plan = as_plan(example_plan())
    sizes = plan.bytes_per_device
    room = sizes.capacity - sizes.peak
    first = msgspec.structs.replace(
        plan, bytes_per_device=msgspec.structs.replace(sizes, peak=sizes.peak - room // 4)
    )
    depths = Depths(shallow=1, deeper=2, layers=4)
    assert depths.extrapolated(first, plan).fits
    assert not dataclasses.replace(depths, layers=9).extrapolated(first, plan).fits
