# tests: /tests/serving/soak/, wings/serving/
"""Runs a short soak of the server: 30 honest clients and 8 hostile ones."""

import pytest

from tests.serving.soak.soak import Plan, soak

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serving")]


def test_honest_clients_are_answered_among_hostile_ones(trained_logdir, tmp_path):
    plan = Plan(
        seconds=60.0,
        clients=30,
        attackers=8,
        restarts=1,
        pause=1.0,
        stuck_seconds=20.0,
        most_growth=1.0,
    )
    outcome = soak(plan, trained_logdir, tmp_path, print)
    assert not outcome.problems
    assert outcome.stuck_compilers and sum(outcome.attacks.values()) > 50
