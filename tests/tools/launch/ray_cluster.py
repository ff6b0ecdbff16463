"""A real Ray cluster on this machine, for tests: its nodes have loopback addresses of their own."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from tests.tools.train.train_processes import free_port

_RAY = str(pathlib.Path(sys.executable).with_name("ray"))
# A resource of which each node for hosts has one. The head has none.
RESOURCE = "host=1"


class Cluster:
    """The nodes that run, by the last number of their addresses 127.0.0.x."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.port, self.dashboard = free_port(), free_port()
        programs = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **{"PATH": programs, "RAY_USAGE_STATS_ENABLED": "0"},
            # By default, workers give way to all other programs, which may then starve them.
            "RAY_worker_niceness": "0",
            **{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        }
        self.nodes: dict[int, subprocess.Popen] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, number: int) -> None:
        """Starts a node; 1 is the head. Returns when it takes part."""
        head = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}"]
        head += [f"--temp-dir={self.folder}", "--num-cpus=0"]
        other = [f"--address={self.address}", "--num-cpus=1", '--resources={"host": 1}']
        command = [_RAY, "start", "--block", f"--node-ip-address=127.0.0.{number}"]
        command += ["--object-store-memory=80000000", *(head if number == 1 else other)]
        log = (self.folder.parent / f"node{number}.log").open("w")
        self.nodes[number] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in pathlib.Path(log.name).read_text():
            assert time.monotonic() < deadline and self.nodes[number].poll() is None
            time.sleep(0.2)

    def kill(self, number: int) -> None:
        """Kills a node and everything that runs on it, as a loss of power does."""
        node = self.nodes.pop(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(node.pid)
            for process in [processes, *processes.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        node.wait()

    def run(self, *command: str) -> subprocess.Popen:
        """Starts a command that finds this cluster."""
        addresses = {
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
        }
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        environment = {**self.environment, **addresses}
        return subprocess.Popen(
            [*command], env=environment, cwd="/", stdout=pipe, stderr=same, text=True
        )


@contextlib.contextmanager
def running(folder: pathlib.Path, nodes: int) -> Iterator[Cluster]:
    """Starts a cluster of a head and some nodes for hosts, 127.0.0.2 and so on; ends it."""
    cluster = Cluster(folder / "ray")
    cluster.folder.mkdir()
    try:
        for number in range(1, nodes + 2):
            cluster.start(number)
        yield cluster
    finally:
        for number in sorted(cluster.nodes, reverse=True):
            cluster.kill(number)
