"""Tests what a plan takes under loads, against sums over steps and layers."""

import msgspec
import numpy as np
import pytest

from lingvo_gshard.wings.planning.loads.file import LayerRecords, Loads
from lingvo_gshard.wings.planning.loads.rating import rate
from lingvo_gshard.wings.planning.plan.plan import Plan
from tests.planning.loads.example_loads import (
    EXCHANGE_SECONDS,
    EXPERTS,
    EXPERTS_SECONDS,
    LAYER,
    STEP_SECONDS,
    choose,
    dropless,
    layer_of,
    plan,
    record_of,
)

STEPS = 10
RECORDS = [record_of(choose(step), step, 6) for step in range(1, STEPS + 1)]


def rated(layer, replicas=0, records=RECORDS):
    return rate(plan(), [layer], Loads("load.json", {LAYER: records}), replicas)


def check_quantiles(found, values):
    """Checks quantiles against the sorted numbers of the steps."""
    ordered = np.sort(values)
    assert found.mean == pytest.approx(values.mean())
    for share, quantile in ((0.5, found.p50), (0.9, found.p90), (1.0, found.worst)):
        assert quantile == pytest.approx(ordered[round(share * len(values)) - 1])
    assert found.p99 == found.worst


def test_dropless_steps_take_as_long_as_their_slowest_device():
    layer = dropless()
    found = rated(layer)
    rows = LayerRecords(layer, RECORDS)
    computed = rows.computed(layer.devices.contiguous())
    check_quantiles(found.step_seconds, STEP_SECONDS + EXPERTS_SECONDS * (computed - 1))
    placed = rows.computed(np.array(found.layers[0].placement))
    check_quantiles(found.step_seconds_placed, STEP_SECONDS + EXPERTS_SECONDS * (placed - 1))
    (one,) = found.layers
    check_quantiles(one.seconds, EXPERTS_SECONDS * computed)
    check_quantiles(one.slowest, rows.slowest(layer.devices.contiguous()))
    assert one.experts_seconds == pytest.approx(EXPERTS_SECONDS)
    assert found.step_seconds_dropping_nothing is one.sufficient_factor is one.capacity is None
    assert found.dropped_share and found.dropped_share.worst == 0.0
    check_quantiles(one.sufficient_bound, rows.sufficient_bound(layer.devices.contiguous()))


def test_each_further_round_takes_an_exchange():
    layer = dropless(bound=0.5)
    rows = LayerRecords(layer, RECORDS)
    placement = layer.devices.contiguous()
    rounds = rows.further_rounds(placement)
    assert min(rounds) > 0
    experts = EXPERTS_SECONDS * (rows.computed(placement) - 1)
    check_quantiles(rated(layer).step_seconds, STEP_SECONDS + experts + EXCHANGE_SECONDS * rounds)


def test_buffers_cost_the_same_under_all_loads_and_more_if_nothing_is_to_be_dropped():
    layer = layer_of()
    found = rated(layer)
    assert found.step_seconds.p50 == found.step_seconds.worst == STEP_SECONDS
    assert found.step_seconds_placed == found.step_seconds
    slots = LayerRecords(layer, RECORDS).sufficient_slots()
    more = (EXPERTS_SECONDS + EXCHANGE_SECONDS) * (slots / layer.capacity - 1)
    check_quantiles(found.step_seconds_dropping_nothing, STEP_SECONDS + more)
    check_quantiles(found.dropped_share, np.array([r.dropped_share for r in RECORDS]))
    (one,) = found.layers
    assert (one.capacity, one.capacity_factor) == (6, 1.0) and one.bound is None
    assert any("are computed, full or empty" in note for note in found.notes)


def test_the_share_of_all_layers_counts_requests():
    layers = [layer_of(), dropless(path="encoder.layers[1].feed_forward")]
    loads = Loads("load.json", {layer.path: RECORDS for layer in layers})
    found = rate(plan(), layers, loads)
    check_quantiles(found.dropped_share, np.array([r.dropped_share for r in RECORDS]) / 2)


def test_a_placement_is_judged_by_steps_that_it_was_not_found_from():
    (one,) = rated(dropless()).layers
    load = np.sum([record.choices for record in RECORDS], 0)
    on_device = [load[experts].sum() for experts in one.placement]
    least = max(load.sum() / 4, load.max() + load.min())
    assert one.gap == pytest.approx(max(on_device) / least - 1)
    assert sorted(sum(one.placement, [])) == list(range(EXPERTS))
    rows = LayerRecords(dropless(), RECORDS)
    given = rows.slowest(dropless().devices.contiguous())
    assert one.later == pytest.approx(given[STEPS // 2 :].mean())
    assert one.later_placed and one.later_placed != one.placed.mean
    (single,) = rated(dropless(), records=RECORDS[:1]).layers
    assert single.later is single.later_placed is None


def test_a_placement_is_never_worse_than_none():
    even = [msgspec.structs.replace(RECORDS[0], choices=[48] * EXPERTS, by_part=[])]
    (one,) = rated(dropless(), records=even).layers
    assert one.placement == [[0, 1], [2, 3], [4, 5], [6, 7]] and one.gap == 0
    assert one.slowest == one.placed


def test_copies_of_hot_experts_even_the_loads_and_take_memory():
    without, found = rated(dropless()), rated(dropless(), replicas=4)
    (one,) = found.layers
    assert one.replicas == 4 and [len(experts) for experts in one.placement] == [3] * 4
    assert one.placed.p50 < without.layers[0].placed.p50
    # One more expert on each device, of 1,000 bytes.
    assert found.replica_bytes == 1000 and without.replica_bytes == 0
    assert one.placed_bound is None
    assert any("replicas are planned only" in note for note in found.notes)


def test_layers_of_a_loop_share_its_time():
    (one,) = rated(dropless(times=3)).layers
    assert one.experts_seconds == pytest.approx(EXPERTS_SECONDS / 3)


def test_notes_say_what_is_unknown():
    other = rated(dropless(groups=16, micro_batches=2))
    words = " ".join(other.notes)
    assert "other groups than in the file (8 of 24 tokens there, 32 of 24 here)" in words
    assert "sufficient bounds are unknown" in words and "means over the micro-batches" in words
    loads = Loads("load.json", {LAYER: RECORDS[:1]}, is_measured=True)
    (first, *_) = rate(plan(), [layer_of()], loads).notes
    assert "those of its test rows" in first


def test_a_plan_with_loads_is_read_back():
    whole = msgspec.structs.replace(plan(), loads=rated(dropless(), replicas=4))
    assert msgspec.json.decode(whole.to_json(), type=Plan) == whole
