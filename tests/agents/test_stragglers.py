"""Checks that slow hosts are named with their factor."""

from lingvo_gshard.agents.records import Beat, Member, Record
from lingvo_gshard.agents.stragglers import Stragglers
from lingvo_gshard.training.run.monitoring.step_reporter import probe_seconds


def signs(probes: dict[str, float | None], waits: dict[str, float]) -> dict[str, Beat]:
    return {
        host: Beat(host, "1", 1, host, 1, input_seconds=waits.get(host), probe_seconds=seconds)
        for host, seconds in probes.items()
    }


def record(number: int = 1, hosts: str = "abc") -> Record:
    return Record(number, tuple(Member(host, "1") for host in hosts))


def test_a_slow_device_is_named_once_in_a_round():
    found = Stragglers()
    beats = signs({"a": 0.010, "b": 0.050, "c": 0.011, "spare": 9.0}, {})
    (line,) = found.found(record(), beats)
    assert line.startswith("Slow host b: 4.8 times as slow; its devices take 0.05 s")
    assert not found.found(record(), beats)
    assert found.found(record(2), beats)


def test_a_host_that_waits_for_batches_is_named():
    probes = dict.fromkeys("abc", 0.01)
    (line,) = Stragglers().found(record(), signs(probes, {"a": 0.001, "b": 0.2, "c": 0.002}))
    assert line.startswith("Slow host b: 4.0 times as slow; it waits 0.2 s for a batch")


def test_usual_differences_and_missing_times_name_nobody():
    found = Stragglers()
    assert not found.found(record(), signs({"a": 0.010, "b": 0.012, "c": 0.009}, {"a": 0.04}))
    assert not found.found(record(), signs({"a": 0.010, "b": None, "c": None}, {}))
    assert not found.found(record(hosts="a"), signs({"a": 5.0}, {"a": 1.0}))


def test_a_probe_takes_some_time_of_each_device():
    assert 0 < probe_seconds() < 60
