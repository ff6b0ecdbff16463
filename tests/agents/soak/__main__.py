"""Trains on four hosts under random faults, and compares with a run without any.

    python -m tests.agents.soak --seed=0 --minutes=60 --every=120

Hosts are network namespaces on this machine. Workers run gshard-train with a tiny model, or with
--training=stand_in a toy state that takes more steps and also fewer hosts (trainings.py). Every so
many seconds a fault is drawn (faults.py). The report has each fault with the steps and the time
that it cost. The final state must be that of a run without faults, to the bit.
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
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from tests.agents.soak import faults, network, trainings
from tests.agents.soak.hosts import HOSTS, Cluster
from tests.agents.soak.network import Network
from tests.agents.soak.steps import Steps
from tests.agents.soak.trainings import TRAININGS, Training

# No fault may keep the job from a new step for so long.
_PATIENCE = 300.0
_ROUND = re.compile(r"^\[host-\d\] Round (\d+)(.*)$", re.MULTILINE)


@dataclasses.dataclass
class Fault:
    """A fault that was inflicted, and what it cost.

    Attributes:
      at: seconds since the first step.
      load: processes that run or wait for a core of the machine.
      steps: steps that were taken again in each restart that followed.
      idle_seconds: time without steps.
      lost_seconds: the idle time, and the time of the steps that were taken again.
    """

    name: str
    host: int
    at: float
    load: float
    steps: tuple[int, ...] = ()
    idle_seconds: float = 0.0
    lost_seconds: float = 0.0


def newest_step(cluster: Cluster) -> tuple[float, int]:
    """Returns the time and the number of the newest step."""
    found = []
    for host in range(HOSTS):
        with cluster.log(host).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
            text = log.read().decode("utf-8", "replace")
        found += [(float(at), int(step)) for step, at in re.findall(r"step (\d+) at (\S+)\n", text)]
    return max(found, default=(0.0, 0))


def suffer(cluster: Cluster, name: str, host: int) -> str | None:
    """Inflicts a fault, and waits for a new step. Returns why there is none; None if there is."""
    before = newest_step(cluster)[1]
    faults.FAULTS[name](cluster, host)
    ended = time.monotonic()
    while True:
        at, step = newest_step(cluster)
        if at > ended and step > before:
            return None
        if not cluster.keep():
            return f"{name} on host {host} has ended the job"
        if time.monotonic() - ended > _PATIENCE:
            return f"no step for {_PATIENCE:g} s after {name} on host {host}"
        time.sleep(0.2)


def is_right(training: Training, logdir: pathlib.Path) -> bool:
    """Returns whether the newest checkpoint is that of a run without faults, to the bit."""
    checkpoint = trainings.newest(logdir)
    print(f"the last checkpoint is of step {checkpoint.step:,}", flush=True)
    return trainings.is_equal(trainings.arrays(checkpoint), training.expected(checkpoint.step))


@dataclasses.dataclass
class Storm:
    """The faults of a soak, and when it began and ended.

    Attributes:
      problem: why the job did not go on after a fault; None if it did.
    """

    faults: list[Fault]
    began: float
    ended: float
    problem: str | None = None


def inflict(cluster: Cluster, names: Sequence[str], options: argparse.Namespace) -> Storm:
    """Inflicts random faults until the time is over or the job does not go on."""
    draw = random.Random(options.seed)
    bag: list[str] = []
    began = due = time.monotonic()
    storm = Storm([], began, began + 60 * options.minutes)
    while storm.problem is None:
        due = max(due + options.every * (0.5 + draw.random()), time.monotonic())
        if due > storm.ended:
            cluster.pause(storm.ended - time.monotonic())
            return storm
        cluster.pause(due - time.monotonic())
        bag = bag or draw.sample(names, len(names))
        at, load = time.monotonic() - began, os.getloadavg()[0]
        fault = Fault(bag.pop(), draw.randrange(HOSTS), round(at, 1), round(load, 1))
        storm.faults.append(fault)
        print(f"{fault.at:.0f} s: {fault.name}, host {fault.host}", flush=True)
        storm.problem = suffer(cluster, fault.name, fault.host)
    print(storm.problem, flush=True)
    storm.ended = time.monotonic()
    return storm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two faults")
    parser.add_argument("--only", action="append", help="a fault; may be repeated")
    parser.add_argument("--training", choices=TRAININGS, default="real", help="what is trained")
    options = parser.parse_args()
    if problem := network.problem():
        print(f"skipped: {problem}")
        return 0
    # Namespaces and mounts are removed also when it is asked to end early.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gshard-soak-"))
    print(f"logs: {folder}", flush=True)
    training = TRAININGS[options.training](folder, HOSTS)
    with Network(HOSTS) as net, Cluster(net, folder, training) as cluster:
        missing = faults.left_out(cluster)
        names = [one for one in options.only or faults.FAULTS if one not in missing]
        print(f"netem: {net.has_netem}; left out: {missing or 'nothing'}", flush=True)
        while not newest_step(cluster)[1]:
            cluster.pause(1)
        storm = inflict(cluster, names, options)
        codes = cluster.stop()
    logs = [cluster.log(host) for host in range(HOSTS)]
    report(Steps.of(logs), storm, training)
    rounds = [one for log in logs for one in _ROUND.findall(log.read_text("utf-8", "replace"))]
    for number, words in sorted(rounds, key=lambda one: int(one[0])):
        print(f"round {number}{words}")
    print(f"exit codes {codes}")
    right = is_right(training, folder / "run")
    print("the state is right to the bit" if right else "THE STATE IS WRONG")
    return 0 if right and storm.problem is None else 1


def report(steps: Steps, storm: Storm, training: Training) -> None:
    """Prints what each fault cost, and what all of them did."""
    inflicted, began, ended = storm.faults, storm.began, storm.ended
    times = [began + fault.at for fault in inflicted] + [ended]
    by_name = collections.defaultdict(list)
    for fault, begin, end in zip(inflicted, times, times[1:], strict=False):
        lost = steps.lost(begin, end)
        fault.steps = lost.steps
        fault.idle_seconds, fault.lost_seconds = round(lost.idle_seconds, 1), round(lost.seconds, 1)
        by_name[fault.name].append(fault)
        print(json.dumps(dataclasses.asdict(fault)))
    print(f"{'fault':28} times  most steps lost  seconds lost, mean")
    for name, found in by_name.items():
        most = max((step for fault in found for step in fault.steps), default=0)
        mean = np.mean([fault.lost_seconds for fault in found])
        print(f"{name:28} {len(found):5}  {most:15}  {mean:18.1f}")
    seconds, lost = ended - began, steps.lost(began, ended)
    kept, usual = steps.kept(began, ended), steps.usual_seconds
    load = np.mean([fault.load for fault in inflicted])
    print(f"{kept:,} steps in {seconds:,.0f} s with {len(inflicted)} faults")
    print(f"{os.cpu_count()} cores, for which {load:.0f} processes ran or waited")
    print(f"a step takes {usual:.3f} s; snapshots every {training.snapshot_every} steps")
    print(f"checkpoints every {training.checkpoint_every} steps; restarts: {len(lost.steps)}")
    print(f"steps taken again in a restart: at most {max(lost.steps, default=0)}")
    print(
        f"goodput: {1 - lost.seconds / seconds:.1%} by time, {kept * usual / seconds:.1%} by steps"
    )


if __name__ == "__main__":
    sys.exit(main())
