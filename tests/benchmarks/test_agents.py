# tests: /benchmarks/agents/, wings/agents/leader.py, wings/agents/agent.py
"""Runs simulated jobs: real agents keep what they promise, and the simulation notices if not."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.agents import hosts
from benchmarks.agents import world as worlds
from benchmarks.agents.place import Troubles
from benchmarks.agents.world import Setting, World
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.agents.leader import Leader
from lingvo_gshard.wings.agents.records import LOST, Failure, Record


def setting(place="gcs", count=4, days=0.1, failures=12.0, has_rare=True) -> Setting:
    beat, lost = (1.0, 20.0) if place == "nfs" else (5.0, 30.0)
    return Setting(count, 1, count // 2, days, failures, place, beat, lost, 60.0, has_rare=has_rare)


@pytest.mark.parametrize("place", ["gcs", "nfs"])
@pytest.mark.parametrize("seed", range(4))
def test_agents_keep_their_promises_under_many_failures(place, seed):
    row = World(setting(place, days=0.05, failures=20.0), seed).run()
    assert row.problems == [] and row.rounds > 1
    assert 0.3 < row.goodput < 1 and row.reads > 1 and row.writes > 0.3


def test_worlds_of_equal_seeds_are_equal():
    assert World(setting(days=0.03), 1).run() == World(setting(days=0.03), 1).run()


def decisions(world: World) -> list[tuple]:
    """Returns the rounds of a world: why the one before ended, the hosts, and the mesh."""
    return [
        (
            record.failure and (record.failure.kind, record.failure.host),
            [member.host for member in record.members],
            record.mesh,
        )
        for record in world._records()
    ]


@pytest.mark.parametrize(
    ("place", "has_rare", "days", "failures"),
    [("gcs", False, 0.25, 5.0), ("gcs", True, 0.12, 12.0), ("nfs", True, 0.05, 36.0)],
)
@pytest.mark.parametrize("seed", [2, 3])
def test_skipped_time_changes_nothing(place, has_rare, days, failures, seed, monkeypatch):
    """The hosts fail as often and as rarely as ever. Only messages are neither late nor lost.

    Which messages are lost depends on how many there were, and thus on the time simulated.
    """
    monkeypatch.setattr(worlds, "Troubles", lambda *_: Troubles())
    given = setting(place, days=days, failures=failures, has_rare=has_rare)
    world, whole = World(given, seed), World(given, seed, skips=False)
    row, expected = world.run(), whole.run()
    assert decisions(world) == decisions(whole) and row.failures == expected.failures > 2
    assert world.clock.skipped > 0.3 * world.clock.now and whole.clock.skipped == 0
    assert row.problems == expected.problems == []
    assert row.goodput == pytest.approx(expected.goodput, abs=0.005)
    assert row.recovery_seconds == pytest.approx(expected.recovery_seconds, abs=10)
    assert row.slowest_seconds == pytest.approx(expected.slowest_seconds, abs=10)
    for name in ("reads", "writes", "read_megabytes"):
        assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=0.2), name


def test_skipped_time_hides_no_lost_messages():
    """Skips wait for late messages and for hosts that seem lost, so that as much goes wrong."""
    given = setting(days=0.1)
    pairs = [(World(given, k).run(), World(given, k, skips=False).run()) for k in range(5)]
    assert all(one.failures == two.failures for one, two in pairs)
    rounds, goodput = (
        [sum(getattr(row, name) for row in rows) for rows in zip(*pairs, strict=True)]
        for name in ("rounds", "goodput")
    )
    assert rounds[0] == pytest.approx(rounds[1], rel=0.15)
    assert goodput[0] == pytest.approx(goodput[1], rel=0.03)


def test_the_leader_of_a_large_job_reads_few_files():
    """Each file is read by one other host; the leader reads those that tell it the rest."""
    reads = {}
    for count in (36, 144):
        world = World(setting(count=count, days=0.008, failures=0.0, has_rare=False), 1)
        row = world.run()
        assert row.rounds == 1 and row.problems == []
        before, since = world.place.reads_of("host-0000"), world.clock.awake()
        with hosts.replaced(world.job):
            world.clock.run(200.0)
        after = world.place.reads_of("host-0000")
        reads[count] = (after - before) / (world.clock.awake() - since)
    # Below 64 hosts, it reads all.
    assert reads[144] < 1.1 * reads[36]


def test_a_leader_that_blames_the_wrong_host_is_found_out(monkeypatch):
    blame = Leader._failure

    def wrong(self, current: Record, outcomes, beats):
        failure = blame(self, current, outcomes, beats)
        others = [m.host for m in current.members if failure is None or m.host != failure.host]
        return failure and Failure(LOST, others[0], None, "gives no sign of life")

    monkeypatch.setattr(Leader, "_failure", wrong)
    problems = [p for seed in range(3) for p in World(setting(days=0.05), seed).run().problems]
    assert any("blames" in problem for problem in problems)


def test_two_rounds_at_work_are_found_out(monkeypatch):
    """Workers whose agents do not end them when they follow a new record."""
    monkeypatch.setattr(hosts.SimulatedWorker, "kill", lambda self, reason="": None)
    problems = [p for seed in range(3) for p in World(setting(days=0.05), seed).run().problems]
    assert any("are at work" in problem for problem in problems)


def test_the_command_shows_a_row_for_each_seed(capsys, tmp_path):
    path = tmp_path / "agents.json"
    arguments = ["agents", "--hosts=4", "--days=0.03", "--failures=12", "--rare", "--seeds=1,2"]
    code = startup.guarded(benchmarks.NAME, benchmarks.main)(
        ["benchmarks", *arguments, f"--json={path}"]
    )
    assert code == 0 and "goodput" in capsys.readouterr().out
    assert [row["seed"] for row in json.loads(path.read_text())["rows"]] == [1, 2]
    code = startup.guarded(benchmarks.NAME, benchmarks.main)(["benchmarks", "agents", "--place=s"])
    assert code == 1 and "--place=s is unknown" in capsys.readouterr().err
