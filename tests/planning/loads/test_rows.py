# tests: wings/planning/loads/devices.py, wings/planning/loads/layers.py
"""Tests the rows of devices, dropped rows and buffers against loops over tokens."""

import math

import msgspec
import numpy as np
import pytest

from lingvo_gshard.wings.planning.loads.devices import EMPTY
from lingvo_gshard.wings.planning.loads.file import LayerRecords
from tests.planning.loads.example_loads import (
    CHOICES,
    EXPERTS,
    GROUPS,
    SIZE,
    choose,
    dropless,
    layer_of,
    record_of,
)

STEPS = 3
CHOSEN = [choose(seed) for seed in range(STEPS)]


def rows_of(layer):
    return LayerRecords(layer, [record_of(c, 5 * i, layer.capacity) for i, c in enumerate(CHOSEN)])


def sent(chosen, device_of_group, device_of_expert):
    """Returns {(from, to): rows}, by a loop over the tokens."""
    counts = {}
    for g, s, c in np.ndindex(GROUPS, SIZE, CHOICES):
        pair = device_of_group(g), device_of_expert(chosen[g, s, c])
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def test_slowest_device_is_that_of_a_loop_over_tokens():
    rows = rows_of(layer_of())
    found = rows.slowest(rows.layer.devices.contiguous())
    for chosen, ratio in zip(CHOSEN, found, strict=True):
        on_device = np.zeros(4)
        for (_, device), count in sent(chosen, lambda g: g // 2, lambda e: e // 2).items():
            on_device[device] += count
        assert ratio == pytest.approx(on_device.max() / on_device.mean())


def test_slowest_device_of_a_mesh_with_two_axes():
    """Groups are split over both axes, experts over the second: each slice has its own tokens."""
    rows = rows_of(layer_of("fsdp=2,data=4", ("fsdp", "data"), ("data",)))
    found = rows.slowest(rows.layer.devices.contiguous())
    assert rows.layer.devices.slices == 2 and rows.layer.devices.sources == 4
    for chosen, ratio in zip(CHOSEN, found, strict=True):
        on_device = np.zeros((2, 4))
        for (source, part), count in sent(chosen, lambda g: g, lambda e: e // 2).items():
            on_device[source // 4, part] += count
        assert ratio == pytest.approx(on_device.max() / on_device.mean())


def test_slowest_device_where_the_minor_axis_of_groups_splits_no_experts():
    rows = rows_of(layer_of("data=4,fsdp=2", ("data", "fsdp"), ("data",)))
    for chosen, ratio in zip(CHOSEN, rows.slowest(rows.layer.devices.contiguous()), strict=True):
        on_device = np.zeros((2, 4))
        for (source, part), count in sent(chosen, lambda g: g, lambda e: e // 2).items():
            on_device[source % 2, part] += count
        assert ratio == pytest.approx(on_device.max() / on_device.mean())


def test_experts_that_are_not_split_make_every_device_as_slow_as_its_tokens():
    rows = rows_of(layer_of(expert_axes=()))
    np.testing.assert_allclose(rows.slowest(rows.layer.devices.contiguous()), 1.0)


@pytest.mark.parametrize("capacity", [1, 3, 6, 9, SIZE])
def test_dropped_rows_are_those_of_a_loop_over_positions(capacity):
    layer = layer_of(capacity=capacity)
    rows = LayerRecords(layer, [record_of(c, i, 6) for i, c in enumerate(CHOSEN)])
    expected = [c.size - sum(record_of(c, 0, capacity).kept) for c in CHOSEN]
    np.testing.assert_allclose(rows.dropped(layer.devices.contiguous()), expected)


def test_a_sufficient_capacity_drops_nothing_and_one_slot_less_does():
    rows = rows_of(layer_of())
    for chosen, slots, factor in zip(
        CHOSEN, rows.sufficient_slots(), rows.sufficient_factor(), strict=True
    ):
        assert sum(record_of(chosen, 0, int(slots)).kept) == chosen.size
        assert sum(record_of(chosen, 0, int(slots) - 1).kept) < chosen.size
        # As layers/moe/routing.py computes the slots from the factor.
        assert int(SIZE * factor * CHOICES / EXPERTS) == slots


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_sufficient_bound_drops_nothing_and_less_does(is_gathered):
    """A bound limits the rows for each pair of devices, or those of a device that gathers."""
    mesh = {"mesh": "data=4", "is_gathered": is_gathered, "drops": True}
    senders = 1 if is_gathered else 4
    rows = rows_of(dropless(**mesh))
    placement = rows.layer.devices.contiguous()
    assert np.all(rows.dropped(placement) == 0)
    local = GROUPS // 4 * SIZE * CHOICES
    for step, (chosen, bound) in enumerate(
        zip(CHOSEN, rows.sufficient_bound(placement), strict=True)
    ):
        counts = sent(chosen, lambda g: g // 2 % senders, lambda e: e // 2)
        most = max(counts.values())
        # One row more where the bound is rounded up.
        assert most <= math.ceil(bound * local / senders) <= most + 1
        less = rows_of(dropless(bound=(most - 1) * senders / local, **mesh))
        expected = sum(max(count - (most - 1), 0) for count in counts.values())
        assert less.dropped(placement)[step] == expected > 0
        rounds = rows_of(dropless(bound=less.layer.bound, **{**mesh, "drops": False}))
        assert rounds.dropped(placement)[step] == 0
        assert rounds.further_rounds(placement)[step] == 1


def test_computed_rows_are_those_of_the_blocks():
    """As expert_blocks.py has it: full blocks, and a last one of a multiple of the step."""
    rows = rows_of(dropless())
    local = GROUPS // 4 * SIZE * CHOICES
    slots, even = 4 * local, math.ceil(local / 2)
    step = math.ceil(math.ceil(min(slots / 2, 512) / 4) / 8) * 8
    full = math.ceil(min(slots / 2, 512) / step) * step
    planned = 2 * (max(even - 1, 0) // full + 1) * full
    for chosen, ratio in zip(CHOSEN, rows.computed(rows.layer.devices.contiguous()), strict=True):
        on_device = np.zeros(4)
        for e, count in enumerate(np.bincount(chosen.ravel(), minlength=EXPERTS)):
            blocks = 0
            while count > full:
                blocks, count = blocks + full, count - full
            on_device[e // 2] += blocks + math.ceil(count / step) * step
        assert ratio == pytest.approx(on_device.max() / planned)


def test_copies_share_the_rows_of_an_expert():
    rows = rows_of(layer_of())
    counts = np.bincount(CHOSEN[0].ravel(), minlength=EXPERTS)
    placement = np.array([[0, 1, EMPTY], [2, 3, 0], [4, 5, 0], [6, 7, EMPTY]])
    on_device = [counts[0] / 3 + counts[1], counts[[2, 3]].sum() + counts[0] / 3]
    on_device += [counts[[4, 5]].sum() + counts[0] / 3, counts[[6, 7]].sum()]
    assert rows.slowest(placement)[0] == pytest.approx(max(on_device) / np.mean(on_device))


def test_a_larger_batch_has_more_rows_in_the_same_proportions():
    rows = rows_of(dropless(groups=4 * GROUPS))
    small = rows_of(dropless())
    np.testing.assert_allclose(rows.choices, 4 * small.choices)
    placement = rows.layer.devices.contiguous()
    np.testing.assert_allclose(rows.slowest(placement), small.slowest(placement))
    assert rows.sent is None and rows.sufficient_bound(placement) is None
    assert not rows.has_same_groups


def test_what_a_file_does_not_tell_is_unknown():
    records = [
        msgspec.structs.replace(record_of(c, i, 6), positions=[], by_part=[], groups=0)
        for i, c in enumerate(CHOSEN)
    ]
    rows = LayerRecords(layer_of(), records)
    placement = rows.layer.devices.contiguous()
    assert rows.dropped(placement) is rows.sufficient_factor() is None
    np.testing.assert_allclose(rows.choices.sum(1), GROUPS * SIZE * CHOICES)
    assert np.all(rows.slowest(placement) > 1)
    bounded = LayerRecords(dropless(bound=1.0, drops=True), records)
    assert bounded.dropped(placement) is bounded.sufficient_bound(placement) is None
