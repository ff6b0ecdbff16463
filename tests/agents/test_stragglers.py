# tests: wings/agents/stragglers.py, wings/services/step_reporter.py, wings/agents/records.py
"""Checks that slow hosts are named with their factor."""

from lingvo_gshard.wings.agents.records import Beat, Member, Record
from lingvo_gshard.wings.agents.stragglers import Stragglers
from lingvo_gshard.wings.services.step_reporter import probe_seconds


def signs(probes: dict[str, float | None], waits: dict[str, float]) -> dict[str, Beat]:
    return {
        host: Beat(host, "1", 1, host, 1, input_seconds=waits.get(host), probe_seconds=seconds)
        for host, seconds in probes.items()
    }


def record(number: int = 1, hosts: str = "abc") -> Record:
    return Record(number, tuple(Member(host, "1") for host in hosts))


def lines(found: Stragglers, number: int, *times: tuple[dict, dict]) -> list[str]:
    """Returns what is said about times of a round that follow one another."""
    return [line for one in times for line in found.found(record(number), signs(*one))]


def test_a_slow_device_is_named_once_in_a_round():
    found = Stragglers()
    times = [({"a": 0.010, "b": 0.050 + k / 1000, "c": 0.011, "spare": 9.0}, {}) for k in range(9)]
    (line,) = lines(found, 1, *times)
    assert line.startswith("Slow host b: 5.0 times as slow; its devices take 0.052 s")
    assert len(lines(found, 2, *times)) == 1


def test_a_host_that_waits_for_batches_is_named():
    probes = dict.fromkeys("abc", 0.01)
    times = [(probes, {"a": 0.001, "b": 0.2 - k / 1000, "c": 0.002}) for k in range(9)]
    (line,) = lines(Stragglers(), 1, *times)
    assert line.startswith("Slow host b: 4.0 times as slow; it waits 0.198 s for a batch")


def test_a_host_that_is_slow_now_and_then_is_not_named():
    slow, usual = {"a": 0.010, "b": 0.050, "c": 0.011}, {"a": 0.010, "b": 0.012, "c": 0.011}
    other = {**slow, "b": 0.060}
    assert not lines(Stragglers(), 1, *[(one, {}) for one in (slow, other, usual) * 5])
    # A probe that is read many times is one probe.
    assert not lines(Stragglers(), 1, *[(slow, {})] * 9)


def test_usual_differences_and_missing_times_name_nobody():
    found = Stragglers()
    for k in range(9):
        few = k / 1e6
        probes, waits = {"a": 0.010 + few, "b": 0.012 - few, "c": 0.009 + few}, {"a": 0.04 + few}
        assert not found.found(record(), signs(probes, waits))
        assert not found.found(record(), signs({"a": 0.010 + few, "b": None, "c": None}, {}))
        assert not found.found(record(hosts="a"), signs({"a": 5.0 + few}, {"a": 1.0 + few}))


def test_a_probe_takes_some_time_of_each_device():
    assert 0 < probe_seconds() < 60
