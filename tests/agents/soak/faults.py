"""The faults of the soak. Each is inflicted on one host, and ends by itself."""

import json
import os
import signal
import time
from collections.abc import Callable

from tests.agents.soak.hosts import HOSTS, Cluster

_HOUR = 3600
# Each of them lasts long enough that agents notice and act.
_SECONDS = 30
_LONG_SECONDS = 60


def _kill_worker(cluster: Cluster, host: int) -> None:
    if worker := cluster.worker(host):
        os.kill(worker, signal.SIGKILL)


def _stop_worker(cluster: Cluster, host: int) -> None:
    if worker := cluster.worker(host):
        os.kill(worker, signal.SIGSTOP)


def _kill_agent(cluster: Cluster, host: int) -> None:
    cluster.agents[host].kill()


def _stop_agent(cluster: Cluster, host: int) -> None:
    agent = cluster.agents[host]
    agent.send_signal(signal.SIGSTOP)
    cluster.pause(_SECONDS)
    agent.send_signal(signal.SIGCONT)


def _lose_host(cluster: Cluster, host: int) -> None:
    """Loses a host with its memory for so long that the others go on; then it returns."""
    cluster.held.add(host)
    cluster.net.cut(host)
    cluster.agents[host].kill()
    cluster.agents[host].wait()
    cluster.lose_memory(host)
    cluster.pause(_LONG_SECONDS)
    cluster.net.join(host)
    cluster.held.discard(host)


def _cut_off(cluster: Cluster, host: int) -> None:
    cluster.net.cut(host)
    cluster.pause(_LONG_SECONDS)
    cluster.net.join(host)


def _slow_network(cluster: Cluster, host: int) -> None:
    cluster.net.disturb(host, seconds=0.2, loss=0.01)
    cluster.pause(_SECONDS)
    cluster.net.calm(host)


def _slow_host(cluster: Cluster, host: int) -> None:
    cluster.slow(host, 0.2)
    cluster.pause(_LONG_SECONDS)
    cluster.slow(host, None)


def _wrong_clock(cluster: Cluster, host: int) -> None:
    """Sets a clock an hour ahead, then an hour back, and then right."""
    for seconds in (_HOUR, -_HOUR, 0):
        cluster.set_clock(host, seconds)
        cluster.pause(_SECONDS)


def _restart_with_wrong_clock(cluster: Cluster, host: int) -> None:
    cluster.held.add(host)
    cluster.agents[host].kill()
    cluster.agents[host].wait()
    cluster.set_clock(host, -_HOUR)
    cluster.held.discard(host)
    cluster.pause(_LONG_SECONDS)
    cluster.set_clock(host, 0)


def _full_memory(cluster: Cluster, host: int) -> None:
    cluster.fill_memory(host)
    cluster.pause(_SECONDS)
    cluster.free_memory(host)


def _full_memory_and_kill(cluster: Cluster, host: int) -> None:
    """Kills a worker while a host has no memory for newer snapshots."""
    cluster.fill_memory(host)
    cluster.pause(_SECONDS / 3)
    _kill_worker(cluster, host)
    cluster.pause(_SECONDS)
    cluster.free_memory(host)


def _garbage(cluster: Cluster, host: int) -> None:
    del host
    for path in ("agents/hosts/stranger.json", "agents/rounds/99999.json"):
        (cluster.folder / path).write_bytes(os.urandom(1000))


def _ghosts(cluster: Cluster, host: int) -> None:
    """Leaves files in the meeting place that look like hosts and rounds to who is careless."""
    hosts, rounds = cluster.folder / "agents" / "hosts", cluster.folder / "agents" / "rounds"
    sign = hosts / f"host-{host}.json"
    newest = max(rounds.glob("*.json"), key=lambda path: path.stat().st_mtime)
    made = [hosts / f"{name}.json" for name in ("aaa", "zzz", "pipe", "folder")]
    made += [rounds / f"{name}.json" for name in (*range(10**6, 10**6 + 9), "\u00b2", "pipe")]
    for path in made:
        if path.stem == "pipe":
            os.mkfifo(path)
        elif path.stem == "folder":
            path.mkdir()
        else:
            path.write_bytes((sign if path.parent == hosts else newest).read_bytes())
    cluster.pause(_SECONDS)
    for path in made:
        path.rmdir() if path.is_dir() else path.unlink()


def _replay(cluster: Cluster, host: int) -> None:
    """Puts an old sign of a host back, a hundred times a second."""
    sign = cluster.folder / "agents" / "hosts" / f"host-{host}.json"
    old, new = sign.read_bytes(), sign.with_name(".stranger")
    ended = time.monotonic() + _SECONDS
    while time.monotonic() < ended:
        new.write_bytes(old)
        os.replace(new, sign)
        time.sleep(0.01)
        cluster.keep()


def _man_in_the_middle(cluster: Cluster, host: int) -> None:
    """Changes all parts of snapshots that a host gives to others, and has workers start again."""
    sign = (cluster.folder / "agents" / "hosts" / f"host-{host}.json").read_bytes()
    port = json.loads(sign.splitlines()[0])["keeper_port"]
    cluster.net.disturb(host, seconds=0.0, loss=0.0, changed_port=port)
    cluster.pause(_SECONDS)
    _kill_worker(cluster, (host + 1) % HOSTS)
    cluster.pause(_SECONDS)
    cluster.net.calm(host)


def _on_leader(fault: Callable[[Cluster, int], None]) -> Callable[[Cluster, int], None]:
    return lambda cluster, host: fault(cluster, cluster.leader())


_CLOCK, _SPEED = ("clock goes wrong", "restart with a wrong clock"), ("slow host",)

FAULTS: dict[str, Callable[[Cluster, int], None]] = {
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "kill agent": _kill_agent,
    "stop agent": _stop_agent,
    "kill leading agent": _on_leader(_kill_agent),
    "lose host": _lose_host,
    "lose leading host": _on_leader(_lose_host),
    "cut off": _cut_off,
    "slow network": _slow_network,
    _SPEED[0]: _slow_host,
    _CLOCK[0]: _wrong_clock,
    _CLOCK[1]: _restart_with_wrong_clock,
    "full memory": _full_memory,
    "full memory, kill worker": _full_memory_and_kill,
    "garbage": _garbage,
    "ghosts": _ghosts,
    "old signs": _replay,
    "man in the middle": _man_in_the_middle,
}


def left_out(cluster: Cluster) -> dict[str, str]:
    """Returns the faults that this machine cannot have, and why."""
    found = {}
    if cluster.clock_library is None:
        found |= dict.fromkeys(_CLOCK, "there is no C compiler")
    if not all(speed.is_there for speed in cluster.speeds):
        found |= dict.fromkeys(_SPEED, "control groups do not limit the processor")
    return found
