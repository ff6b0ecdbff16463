# tests: wings/agents/leader.py, wings/agents/records.py
"""Checks what a leader decides, with a clock and signs made up by the test."""

import pytest

from lingvo_gshard.wings.agents.leader import Leader
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.records import FAILED, LOST, STOPPED, UNMET, Beat, Outcome, Record
from lingvo_gshard.wings.services.snapshot_parts import Part

HOUR = 3600.0


class Sightings:
    """Who lives, as the test says."""

    def __init__(self):
        self.lost: set[str] = set()

    def is_lost(self, host: str) -> bool:
        return host in self.lost

    def lives(self, host: str) -> bool:
        return host not in self.lost


class Job:
    """A job of hosts a, b, ... whose signs the test changes."""

    def __init__(self, hosts: str = "ab", **options):
        self.now, self.sightings = 0.0, Sightings()
        self.options = AgentOptions(max_hosts=len(hosts), **options)
        fewest = self.options.fewest
        self.meshes = {n: f"data={n}" for n in range(fewest, len(hosts) + 1)}
        self.beats = {host: Beat(host, "1", 1, f"{host}.net", 7000) for host in hosts}
        self.newest: Record | None = None
        self.leader = self.another_leader()

    def another_leader(self) -> Leader:
        return Leader(self.options, self.meshes, self.sightings, lambda: self.now)

    def decide(self) -> Record | None:
        """Lets the leader decide, and everybody follow."""
        record = self.leader.next_record(self.newest, self.beats)
        if record is not None:
            assert record.number == (self.newest.number + 1 if self.newest else 1)
            self.newest = record
            self.leader.notice(record)
        return record

    def wait(self, seconds: float) -> Record | None:
        """Decides, waits, and decides again."""
        self.decide()
        self.now += seconds
        return self.decide()

    def end(self, code: int, problem: str = "", hosts: str = "", **given) -> None:
        """Ends the workers of some hosts; by default of all."""
        for host in hosts or self.beats:
            outcome = Outcome(self.newest.number, code, problem=problem, **given)
            self.change(host, outcome=outcome)

    def change(self, host: str, **given) -> None:
        old = {f: getattr(self.beats[host], f) for f in Beat.__struct_fields__}
        self.beats[host] = Beat(**{**old, **given})

    @property
    def hosts(self) -> str:
        return "".join(member.host for member in self.newest.members)


def test_all_hosts_start_together_when_all_are_there():
    job = Job("abc")
    job.decide()
    assert job.newest.number == 1 and job.hosts == "abc"
    assert job.newest.coordinator == "a.net:7000" and job.newest.mesh == "data=3"
    assert job.wait(1e6) is None


def test_a_start_waits_for_all_hosts_and_then_takes_those_that_came():
    job = Job("abcd", min_hosts=2, gather_seconds=60)
    job.sightings.lost = {"a"}
    job.decide()
    assert job.newest is None
    assert job.wait(59) is None
    assert job.wait(2).members and job.hosts == "bcd"


def test_too_few_hosts_end_the_job_after_a_while():
    job = Job("abc", min_hosts=3, gather_seconds=10, join_seconds=100)
    job.sightings.lost = {"b", "c"}
    assert job.wait(99) is None
    record = job.wait(2)
    assert record.code == 1 and "`min_hosts=3`" in record.reason and "only 1" in record.reason


def test_the_job_ends_well_when_all_workers_have():
    job = Job()
    job.decide()
    job.end(0, hosts="a")
    assert job.decide() is None
    job.end(0)
    assert job.decide().code == 0


def test_a_lost_host_is_waited_for_and_then_done_without():
    job = Job("abc", min_hosts=1, regather_seconds=10)
    job.decide()
    job.sightings.lost = {"b"}
    job.end(1, "process 1 of 3 is gone", "ac", is_consequence=True)
    assert job.wait(9) is None
    record = job.wait(2)
    assert job.hosts == "ac" and record.mesh == "data=2"
    assert (record.failure.kind, record.failure.host) == (LOST, "b")


def test_hosts_that_are_all_there_go_on_at_once():
    job = Job()
    job.decide()
    job.end(-9, hosts="b", step=7)
    job.end(1, "process 1 of 2 is gone", "a", is_consequence=True, step=7)
    record = job.decide()
    assert job.hosts == "ab" and record.failure.host == "b"
    assert str(record.failure) == "b was killed by SIGKILL (after step 7)"


def test_workers_that_do_not_end_are_waited_for():
    job = Job(stop_seconds=100)
    job.decide()
    job.end(-9, hosts="b")
    assert job.wait(99) is None
    assert job.wait(2).failure.host == "b"


def test_a_trouble_that_has_passed_shortens_no_later_one():
    """After an agent was silent for a while, the next failure waits for all workers, too."""
    job = Job("abc", stop_seconds=100)
    job.decide()
    job.sightings.lost = {"b"}
    assert job.wait(50) is None
    job.sightings.lost = set()
    assert job.wait(500) is None
    job.end(1, "process 1 of 3 is gone", "ac", is_consequence=True)
    assert job.decide() is None and job.wait(99) is None
    job.change("b", life="2")
    record = job.decide()
    assert (record.failure.kind, record.failure.host) == (LOST, "b")
    assert [member.life for member in record.members] == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("steps", "told", "words"),
    [
        ({"b": 7}, None, "b gives no sign of life (after step 7)"),
        ({"a": 1_200, "b": 1_199}, None, "b gives no sign of life (after step 1,200)"),
        ({}, 9, "b gives no sign of life (after step 9)"),
        ({}, None, "b gives no sign of life (before the round's first step)"),
    ],
)
def test_a_lost_host_is_told_of_with_the_last_step_of_its_round(steps, told, words):
    job = Job("abc", min_hosts=1)
    job.decide()
    for host, step in steps.items():
        job.change(host, step=step)
    job.sightings.lost = {"b"}
    job.end(1, "process 1 of 3 is gone", "ac", is_consequence=True, step=told)
    assert str(job.wait(HOUR).failure) == words


def test_an_agent_that_started_again_is_a_failure_of_its_host():
    job = Job()
    job.decide()
    job.change("b", life="2")
    job.end(1, hosts="a", is_consequence=True)
    record = job.decide()
    assert (record.failure.kind, record.failure.host) == (LOST, "b")
    assert [member.life for member in record.members] == ["1", "2"]


def test_the_same_failure_twice_ends_the_job():
    job = Job()
    for step in (12, 12):
        job.decide()
        job.end(1, "failed (NonFiniteError: step 13)", step=step)
    record = job.decide()
    assert record.code == 1
    assert "twice in a row" in record.reason and "NonFiniteError: step 13" in record.reason


@pytest.mark.parametrize(("first", "second"), [((12, "x"), (13, "x")), ((12, "x"), (12, "y"))])
def test_other_failures_do_not(first, second):
    job = Job()
    for step, problem in (first, second):
        job.decide()
        job.end(1, problem, step=step)
    assert job.decide().code is None


def test_signals_before_the_first_step_prove_nothing_but_errors_do():
    for code, problem, expected in ((-9, "", None), (1, "no such experiment", 1)):
        job = Job()
        for _ in range(2):
            job.decide()
            job.end(code, problem)
        assert job.decide().code == expected


def test_too_many_failures_in_an_hour_end_the_job_and_are_remembered_by_the_next_leader():
    job = Job(max_restarts=3, max_host_failures=99)
    job.decide()
    for step in range(3):
        job.now += 60
        job.end(-9, hosts="a", step=step)
        job.end(1, hosts="b", is_consequence=True)
        assert job.decide().code is None
    job.leader = job.another_leader()
    job.leader.notice(job.newest)
    job.end(-9, hosts="a", step=9)
    job.end(1, hosts="b", is_consequence=True)
    record = job.decide()
    assert record.code == 1 and "`max_restarts=3`" in record.reason


def test_failures_are_forgotten_after_an_hour():
    job = Job(max_restarts=1, max_host_failures=99)
    job.decide()
    for step in range(5):
        job.now += 1.1 * HOUR
        job.end(-9, step=step)
        record = job.decide()
        assert record.code is None and len(record.past) == 1
    job.now += 0.9 * HOUR
    job.end(-9, step=9)
    assert job.decide().code == 1


def test_requests_to_stop_are_no_failures_and_who_leaves_is_left_out():
    job = Job("ab", min_hosts=1, max_restarts=0, regather_seconds=0)
    job.decide()
    job.change("a", is_leaving=True)
    job.end(143, step=5)
    record = job.decide()
    assert record.failure.kind == STOPPED and record.code is None and job.hosts == "b"


def test_a_host_that_fails_often_is_left_out_while_others_are_enough():
    job = Job("abc", min_hosts=2, max_host_failures=2, regather_seconds=0)
    job.decide()
    for step in (5, 6):
        job.end(-9, hosts="b", step=step)
        job.end(1, hosts="ac", is_consequence=True)
        record = job.decide()
        assert record.failure.kind == FAILED
    assert job.hosts == "ac"
    # With fewer, it is better than nothing.
    job.sightings.lost = {"c"}
    job.end(1, hosts="a", is_consequence=True)
    job.decide()
    assert sorted(job.hosts) == ["a", "b"]


def test_a_host_that_returns_takes_part_when_the_round_is_old_enough():
    job = Job("abc", min_hosts=2, gather_seconds=0, grow_seconds=300)
    job.sightings.lost = {"a"}
    job.decide()
    assert job.hosts == "bc"
    job.sightings.lost = set()
    assert not job.leader.should_grow(job.newest, job.beats)
    job.now += 301
    assert job.leader.should_grow(job.newest, job.beats)
    job.end(143, hosts="bc", step=20)
    record = job.decide()
    assert job.hosts == "bca" and record.failure is None and record.mesh == "data=3"
    job.now += 1000
    assert not job.leader.should_grow(job.newest, job.beats)


def test_a_job_that_starts_again_does_not_blame_the_round_before():
    job = Job()
    job.decide()
    for host in "ab":
        job.change(host, life="2")
    record = job.decide()
    assert record.number == 2 and record.failure is None and record.past == ()


def test_the_newest_complete_snapshot_is_restored_also_from_copies():
    job = Job("abc", min_hosts=2, regather_seconds=0)
    job.decide()
    assert job.newest.snapshot is None

    def parts(*pairs):
        return tuple(Part(1, serial, 10 * serial, 3, index) for serial, index in pairs)

    job.change("a", parts=parts((1, 0), (1, 2), (2, 0), (2, 2), (3, 0)))
    job.change("b", parts=parts((1, 1), (1, 0), (2, 1), (2, 0), (3, 1)))
    job.change("c", parts=parts((1, 2), (1, 1), (2, 2), (2, 1)))
    job.end(-9, hosts="c", step=31)
    job.end(1, hosts="ab", is_consequence=True)
    # The third is not complete.
    assert job.decide().snapshot == Part(1, 2, 20, 3, 0)
    # Two hosts have all parts of it together.
    job.sightings.lost = {"c"}
    job.end(1, hosts="ab", is_consequence=True)
    record = job.decide()
    assert job.hosts == "ab" and record.snapshot == Part(1, 2, 20, 3, 0)


def test_a_host_that_is_checked_or_unfit_is_done_without_until_it_is_fit():
    job = Job("abc", min_hosts=2, regather_seconds=10, grow_seconds=5)
    job.decide()
    job.change("b", is_unfit=True)
    job.end(1, "the device has failed", "b")
    job.end(1, "process 1 of 3 is gone", "ac", is_consequence=True)
    assert job.wait(9) is None
    job.wait(2)
    assert job.hosts == "ac"
    job.now += 10
    assert not job.leader.should_grow(job.newest, job.beats)
    job.change("b", is_unfit=False)
    assert job.leader.should_grow(job.newest, job.beats)
    assert job.leader.failures_of("b", job.newest) == 1


def test_a_job_that_ends_for_want_of_hosts_names_those_that_are_unfit():
    job = Job("ab", join_seconds=100)
    job.decide()
    job.change("b", is_unfit=True)
    job.end(1, "the device has failed", "b")
    job.end(1, "process 1 of 2 is gone", "a", is_consequence=True)
    record = job.wait(101)
    assert record.code == 1 and record.reason.endswith("kept out by gshard-doctor: b")


def test_a_network_that_is_cut_for_long_ends_no_job_and_blames_no_host():
    job = Job("abc", regather_seconds=0, max_host_failures=1)
    job.decide()
    for number in range(2, 8):
        for host in "abc":
            job.end(1, f"process 1 of 3 is gone, says {host}", host, is_consequence=True)
        record = job.decide()
        assert record.number == number and job.hosts == "abc" and record.code is None
        assert record.failure.kind == UNMET
    assert all(job.leader.failures_of(host, job.newest) == 0 for host in "abc")
    assert len(job.newest.past) == 6
