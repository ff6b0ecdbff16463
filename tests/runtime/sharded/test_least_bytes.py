# tests: runtime/spmd.py, sharding/strategies.py, training/step/gradients.py
"""Compares the bytes that compiled training steps communicate with the least possible."""

import math

import pytest

from tests.runtime.sharded import least_bytes
from tests.runtime.sharded.least_bytes import CASES, compiled, least


def test_all_weights_are_counted():
    specs = least_bytes.trainer().theta_specs.flatten()
    counted = sum(group.count for group in least_bytes.weights())
    assert counted == sum(math.prod(spec.shape) for spec in specs)


def test_the_least_of_simple_cases():
    """8 devices that split the batch reduce all weights, and each holds one expert of eight."""
    by_name = {case.strategy: least(case) for case in CASES}
    every, experts = (
        4 * sum(group.count for group in least_bytes.weights()),
        4 * 8 * 2 * 2 * 64 * 128,
    )
    assert by_name["data"].reduced == every and by_name["data"].total == every
    assert by_name["expert"].reduced == every - experts
    # 2 layers, there and back in both passes, of 2 choices of 32 tokens on each device.
    assert by_name["expert"].exchanged == 2 * 4 * 2 * 32 * 64 * 4


# test_spmd.py counts the collectives of a step in seconds.
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.strategy)
def test_a_step_communicates_hardly_more_than_it_must(case):
    ratio = compiled(case).total / least(case).total
    # Less would be an error of the formulas.
    assert 1 <= ratio <= case.limit


@pytest.mark.slow
def test_the_table_has_the_bytes_of_a_case():
    assert "| `data` | `data=8` | 1804 / 1804 |  |  | 1804 | 1804 | 1.00 |" in least_bytes.table(
        CASES[:1]
    )
