"""Tests which services take part in runs, and their order."""

from lingvo_gshard.training.run.monitoring.step_observer import OBSERVERS


def test_a_step_that_is_taken_back_is_neither_shown_nor_recorded():
    names = [name for name, _ in OBSERVERS.items()]
    taken_back = names.index("roll backs")
    assert all(names.index(name) > taken_back for name in ("display", "trackers", "snapshots"))


def test_services_of_all_runs_take_part():
    expected = {"compilations", "routers", "memory", "divergence", "roll backs", "snapshots"}
    assert expected <= {name for name, _ in OBSERVERS.items()}
