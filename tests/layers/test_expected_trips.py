"""Tests that the planner finds in a loop's name how often the loop usually runs."""

import pytest

from lingvo_gshard.layers.stacks import execution


@pytest.mark.parametrize("trips", [0, 1, 128])
def test_names_tell_trips(trips):
    name = execution.loop_name(trips)
    assert execution.trips_of(name) == trips
    # TensorFlow numbers equal names, and the compiler puts scopes before them.
    assert execution.trips_of(f"jit(call)/decoder/layers/{name}_3") == trips


def test_other_names_tell_none():
    assert execution.trips_of("decoder/layers/while_3") is None


def test_the_innermost_name_counts():
    assert execution.trips_of("expected_8_trips/x/expected_2_trips_1") == 2
