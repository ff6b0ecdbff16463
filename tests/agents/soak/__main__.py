"""Trains on four hosts under random faults, and compares with a run without any.

    python -m tests.agents.soak --seed=0 --minutes=60 --every=120

Hosts are network namespaces on this machine, and workers train the toy state of
tests/runtime/cluster/cluster_run.py with real collectives and checkpoints. Every so many seconds a
fault is drawn: a worker, an agent or a host is killed, a process is stopped, a host is cut off, or
its network is slow. The report has each fault with the time until the next step. The final state
must be that of one process without faults, to the bit.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from tests.agents.soak import network
from tests.agents.soak.network import Network
from tests.runtime.cluster import cluster_run

HOSTS = 4
# cluster_run sleeps so long after each step.
_STEP_SECONDS = 0.05
_SLOW = "slow network"
# No fault may delay a step so long.
_PATIENCE = 300.0
_WORKER = "tests.runtime.cluster.cluster_run"
_OPTIONS = ["--lost_seconds=10", "--regather_seconds=60", "--stop_seconds=60", "--max_restarts=999"]


@dataclasses.dataclass
class Fault:
    """A fault, and the seconds from it to the next step."""

    name: str
    host: int
    step: int
    lost_seconds: float = 0.0


class Cluster:
    """The agents of all hosts, which are started again when they are killed."""

    def __init__(self, net: Network, folder: pathlib.Path, steps: int):
        self.net, self.folder, self.steps = net, folder, steps
        self.agents = [self.start(host) for host in range(HOSTS)]
        self.held: set[int] = set()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def start(self, host: int) -> subprocess.Popen:
        command = [*self.net.command(host), sys.executable, "-m", "lingvo_gshard", "launch"]
        command += ["agent", f"--max_hosts={HOSTS}", f"--meeting_place={self.folder}/agents"]
        command += [f"--host=host-{host}", f"--address={self.net.address(host)}", *_OPTIONS]
        worker = [sys.executable, "-m", _WORKER, str(self.folder / "run"), str(self.steps), ""]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        with (self.folder / f"host-{host}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--", *worker], env=environment, stdout=log, stderr=log
            )

    def keep(self) -> bool:
        """Starts killed agents again. Returns whether the job goes on."""
        for host, agent in enumerate(self.agents):
            if (agent.poll() or 0) < 0 and host not in self.held:
                self.agents[host] = self.start(host)
        return any(agent.poll() is None for agent in self.agents)

    def worker(self, host: int) -> int | None:
        """Returns the process of a host's worker."""
        path = pathlib.Path(f"/proc/{self.agents[host].pid}/task/{self.agents[host].pid}/children")
        try:
            return int((path.read_text().split() or ["0"])[0]) or None
        except OSError:
            return None

    @property
    def step(self) -> int:
        """The newest step that any worker has printed."""
        newest = 0
        for host in range(HOSTS):
            with (self.folder / f"host-{host}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
                found = re.findall(rb"^step (\d+) mean", log.read(), re.MULTILINE)
            newest = max([newest, *map(int, found[-1:])])
        return newest


def inflict(name: str, host: int, cluster: Cluster) -> None:
    """Inflicts a fault, and ends it if it lasts."""
    net, agent, worker = cluster.net, cluster.agents[host], cluster.worker(host)
    if name == "kill worker" and worker:
        os.kill(worker, signal.SIGKILL)
    elif name == "kill agent":
        os.kill(agent.pid, signal.SIGKILL)
    elif name == "lose host":
        cluster.held.add(host)
        net.cut(host)
        os.kill(agent.pid, signal.SIGKILL)
        pause(cluster, 20)
        net.join(host)
        cluster.held.discard(host)
    elif name == "cut off":
        net.cut(host)
        pause(cluster, 60)
        net.join(host)
    elif name == _SLOW:
        net.disturb(host, 200, 1)
        pause(cluster, 20)
        net.calm(host)
    elif name == "stop worker" and worker:
        os.kill(worker, signal.SIGSTOP)
    elif name == "stop agent":
        os.kill(agent.pid, signal.SIGSTOP)
        pause(cluster, 30)
        os.kill(agent.pid, signal.SIGCONT)
    elif name == "garbage":
        for path in ("agents/hosts/stranger.json", "agents/rounds/99999.json"):
            (cluster.folder / path).write_bytes(os.urandom(1000))


_FAULTS = (
    *("kill worker", "kill agent", "lose host", "cut off", _SLOW),
    *("stop worker", "stop agent", "garbage"),
)


def pause(cluster: Cluster, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        cluster.keep()
        time.sleep(0.2)


def suffer(cluster: Cluster, name: str, host: int) -> Fault:
    """Inflicts a fault, and waits until new steps are taken."""
    fault, began, before = Fault(name, host, cluster.step), time.monotonic(), cluster.step
    inflict(name, host, cluster)
    while cluster.step <= before and cluster.keep():
        time.sleep(0.2)
        assert time.monotonic() - began < _PATIENCE, f"{fault} has ended the training"
    fault.lost_seconds = time.monotonic() - began
    return fault


def expected(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after so many steps without a fault, in one process.

    All sums are of whole numbers below 2^24, so that they are exact in any order.
    """
    state, step = cluster_run.first_state(), cluster_run.make_step()
    w, row = state.theta.w, state.moments.w.row
    for _ in range(steps):
        w, row, mean = step(w, row)
        # Steps that are started ahead wait for one another forever on a busy machine.
        mean.block_until_ready()
    return np.asarray(w), np.asarray(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two faults")
    options = parser.parse_args()
    if problem := network.problem():
        print(f"skipped: {problem}")
        return 0
    draw, faults = random.Random(options.seed), []
    # The job ends when the time is over.
    steps = int(1e9)
    bag: list[str] = []
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gshard-soak-"))
    with Network(HOSTS) as net, Cluster(net, folder, steps) as cluster:
        names = [name for name in _FAULTS if name != _SLOW or net.can_disturb()]
        if _SLOW not in names:
            print(f"left out, since this kernel has no netem: {_SLOW}")
        while not cluster.step:
            pause(cluster, 1)
        began, first = time.monotonic(), cluster.step
        while time.monotonic() - began < 60 * options.minutes:
            pause(cluster, options.every * (0.5 + draw.random()))
            if not bag:
                bag = draw.sample(names, len(names))
            faults.append(suffer(cluster, bag.pop(), draw.randrange(HOSTS)))
            print(json.dumps(dataclasses.asdict(faults[-1])), flush=True)
        seconds = time.monotonic() - began
        last = cluster.step
        for agent in cluster.agents:
            agent.send_signal(signal.SIGTERM)
        codes = [agent.wait() for agent in cluster.agents]
    return report(folder, faults, seconds, last - first, codes)


def report(
    folder: pathlib.Path, faults: list[Fault], seconds: float, steps: int, codes: list[int]
) -> int:
    """Prints what was found. Returns 0 if the state is right to the bit."""
    by_name = collections.defaultdict(list)
    for fault in faults:
        by_name[fault.name].append(fault.lost_seconds)
    for name, lost in by_name.items():
        print(f"{name}: {len(lost)} times, {np.mean(lost):.1f} s until the next step")
    store = CheckpointStore(folder / "run" / "checkpoints", writable=False)
    checkpoint = store.restore()
    assert checkpoint is not None
    w, row = expected(checkpoint.step)
    is_equal = np.array_equal(checkpoint.theta["w"], w)
    is_equal = is_equal and np.array_equal(checkpoint.moments["w.row"], row)
    goodput = 1 - sum(fault.lost_seconds for fault in faults) / seconds
    print(f"{steps:,} steps in {seconds:,.0f} s with {len(faults)} faults; exit codes {codes}")
    print(f"{goodput:.1%} of the time without the times above; step {checkpoint.step:,}")
    print("the state is right to the bit" if is_equal else "THE STATE IS WRONG")
    print(f"logs: {folder}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
