"""Checks that PeerMonitor reports every kind of process loss to all other processes."""

import queue
import socket

import pytest

from lingvo_gshard.wings.cluster.peer_monitor import Departure, PeerMonitor


class Star:
    """Runs the monitors of several processes in one; `lost` and `ended` record their callbacks."""

    def __init__(self, count: int, ends: bool = True):
        pairs = {k: socket.socketpair(socket.AF_UNIX) for k in range(1, count)}
        self.sockets = {k: theirs for k, (_, theirs) in pairs.items()}
        self.lost = {k: queue.Queue() for k in range(count)}
        self.ended = {k: queue.Queue() for k in range(count)}

        def line(index, connections):
            def on_loss(loss):
                self.lost[index].put(loss)
                return ends

            def end(code):
                self.ended[index].put(code)
                for connection in connections.values():
                    connection.close()

            return PeerMonitor(index, connections, on_loss, end)

        self.lines = {0: line(0, {k: mine for k, (mine, _) in pairs.items()})}
        for k, theirs in self.sockets.items():
            self.lines[k] = line(k, {0: theirs})

    def die(self, index: int) -> None:
        self.sockets[index].shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def no_keepalive(monkeypatch):
    """Local socket pairs have no TCP options."""
    monkeypatch.setattr(
        "lingvo_gshard.wings.cluster.peer_monitor._enable_keepalive", lambda _: None
    )


def test_death_of_one_process_ends_all_others():
    star = Star(4)
    star.die(2)
    for k in (0, 1, 3):
        assert star.lost[k].get(timeout=10) == Departure(2, "is gone", 1, is_sudden=True)
        assert star.ended[k].get(timeout=20) == 1


def test_departure_reports_its_reason():
    star = Star(3)
    star.lines[1].announce_departure(Departure(1, "was stopped (SIGTERM) before the first step", 0))
    for k in (0, 2):
        loss = star.lost[k].get(timeout=10)
        assert loss == Departure(
            1, "was stopped (SIGTERM) before the first step", 0, is_sudden=False
        )
    assert star.ended[2].get(timeout=10) == 0
    star.die(1)
    assert star.ended[0].get(timeout=20) == 0


def test_process_0_waits_until_the_others_have_ended():
    star = Star(3)
    star.lines[0].announce_departure(Departure(0, "failed", 1))
    assert all(star.ended[k].qsize() == 1 for k in (1, 2))


def test_normal_exit_is_not_a_loss():
    star = Star(3)
    for k in (1, 2, 0):
        star.lines[k].announce_done()
    for k in (1, 2):
        star.die(k)
    star.lines[0]._is_alone.wait(10)
    assert not any(q.qsize() for q in (*star.lost.values(), *star.ended.values()))


def test_process_that_exits_by_itself_is_not_ended_twice():
    star = Star(2, ends=False)
    star.die(1)
    assert star.lost[0].get(timeout=10).process == 1
    assert star.lines[0]._is_alone.wait(10)
    assert not star.ended[0].qsize()
