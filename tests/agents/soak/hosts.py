"""The hosts of the soak: their agents, and what each host has of its own.

A host has a network namespace (network.py), a share of the processor (a control group), a memory
for snapshots (a small tmpfs), and a clock (clock.c, where there is a C compiler).
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from tests.agents.soak.network import Network
from tests.agents.soak.trainings import Training

HOSTS = 4
_OPTIONS = (
    *("--regather_seconds=15", "--stop_seconds=60", "--grow_seconds=30"),
    *("--max_restarts=999", "--max_host_failures=999", "--check_after_failures=0"),
)
_MEMORY = "16m"
_GROUPS = pathlib.Path("/sys/fs/cgroup")
_PERIOD = 100_000
# Of a worker; the rest of its host is idle.
_CORES = (os.cpu_count() or 1) / HOSTS


class Speed:
    """A control group that can limit how much of the processor a host gets."""

    def __init__(self, name: str):
        version_1 = (_GROUPS / "cpu" / "cpu.cfs_quota_us").exists()
        self._folder = (_GROUPS / "cpu" if version_1 else _GROUPS) / name
        self._limit = "cpu.cfs_quota_us" if version_1 else "cpu.max"
        self.is_there = version_1 or (_GROUPS / "cgroup.controllers").exists()
        if self.is_there:
            self._folder.mkdir(exist_ok=True)
            self.is_there = (self._folder / self._limit).exists()

    def join(self) -> None:
        """Moves this process into the group."""
        if self.is_there:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, cores: float | None) -> None:
        """Limits the group to so many cores; None ends the limit."""
        quota = None if cores is None else str(int(cores * _PERIOD))
        if self._limit == "cpu.max":
            text = f"{quota or 'max'} {_PERIOD}"
        else:
            text = quota or "-1"
        (self._folder / self._limit).write_text(text)

    def close(self) -> None:
        """Removes the group, which must be empty."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Cluster:
    """The agents of all hosts, which are started again when they are killed."""

    def __init__(self, net: Network, folder: pathlib.Path, training: Training):
        self.net, self.folder, self.training = net, folder, training
        self.speeds = [Speed(f"gshard-soak-{host}") for host in range(HOSTS)]
        self.clock_library = built_clock(folder)
        self.held: set[int] = set()
        self.agents: list[subprocess.Popen] = []

    def __enter__(self) -> "Cluster":
        for host in range(HOSTS):
            self.memory(host).mkdir()
            command = f"mount -t tmpfs -o size={_MEMORY} tmpfs {self.memory(host)}"
            subprocess.run(command.split(), check=True)
            self._clock(host).write_bytes(bytes(8))
        self.agents = [self.start(host) for host in range(HOSTS)]
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for speed in self.speeds:
            speed.close()
        for host in range(HOSTS):
            subprocess.run(["umount", "--lazy", self.memory(host)], check=False)

    def memory(self, host: int) -> pathlib.Path:
        """The folder in memory where a host keeps snapshots."""
        return self.folder / f"memory-{host}"

    def log(self, host: int) -> pathlib.Path:
        """The output of a host's agents and workers."""
        return self.folder / f"host-{host}.log"

    def start(self, host: int) -> subprocess.Popen:
        """Starts the agent of a host."""
        command = [*self.net.command(host), sys.executable, "-m", "lingvo_gshard", "launch"]
        command += ["agent", f"--max_hosts={HOSTS}", f"--meeting_place={self.folder}/agents"]
        command += [f"--host=host-{host}", f"--address={self.net.address(host)}", *_OPTIONS]
        command += [f"--snapshot_folder={self.memory(host)}", *self.training.options]
        environment = {
            **os.environ,
            **self._clock_variables(host),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
        }
        with self.log(host).open("ab") as log:
            return subprocess.Popen(
                [*command, "--", *self.training.command, f"--mesh=data={HOSTS}"],
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=self.speeds[host].join,
            )

    def keep(self) -> bool:
        """Starts killed agents again. Returns whether the job goes on."""
        for host, agent in enumerate(self.agents):
            if (agent.poll() or 0) < 0 and host not in self.held:
                self.agents[host] = self.start(host)
        return any(agent.poll() is None for agent in self.agents)

    def pause(self, seconds: float) -> None:
        """Waits, and starts killed agents again meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.keep()
            time.sleep(0.2)

    def stop(self) -> list[int]:
        """Asks all hosts to save and end. Returns the exit codes of the agents."""
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        return [agent.wait() for agent in self.agents]

    def worker(self, host: int) -> int | None:
        """Returns the process of a host's worker; None if it has none."""
        path = pathlib.Path(f"/proc/{self.agents[host].pid}/task/{self.agents[host].pid}/children")
        try:
            return int((path.read_text().split() or ["0"])[0]) or None
        except OSError:
            return None

    def leader(self) -> int:
        """Returns the host whose agent announced the newest round."""
        rounds = {}
        for host in range(HOSTS):
            found = re.findall(r"^\[host-\d\] Round (\d+)", self.log(host).read_text(), re.M)
            rounds[host] = int(found[-1]) if found else 0
        return max(rounds, key=lambda host: rounds[host])

    def slow(self, host: int, factor: float | None) -> None:
        """Gives a host a part of its share of the processor; None gives it all."""
        self.speeds[host].limit(None if factor is None else factor * _CORES)

    def set_clock(self, host: int, seconds: int) -> None:
        """Sets how many seconds the clock of a host is ahead. Running processes see it at once."""
        with self._clock(host).open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def fill_memory(self, host: int) -> None:
        """Fills the memory of a host."""
        with contextlib.suppress(OSError), self._filling(host).open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()

    def free_memory(self, host: int) -> None:
        """Ends `fill_memory`."""
        self._filling(host).unlink(missing_ok=True)

    def lose_memory(self, host: int) -> None:
        """Empties the memory of a host, as a loss of power does."""
        for path in self.memory(host).iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def _filling(self, host: int) -> pathlib.Path:
        return self.memory(host) / "other-data"

    def _clock(self, host: int) -> pathlib.Path:
        return self.folder / f"clock-{host}"

    def _clock_variables(self, host: int) -> dict[str, str]:
        """Returns the variables that have a process read the clock of its host."""
        if self.clock_library is None:
            return {}
        return {"LD_PRELOAD": str(self.clock_library), "GSHARD_CLOCK": str(self._clock(host))}


def built_clock(folder: pathlib.Path) -> pathlib.Path | None:
    """Compiles clock.c. Returns the library; None where there is no C compiler."""
    source, library = pathlib.Path(__file__).with_name("clock.c"), folder / "clock.so"
    if shutil.which("cc") is None:
        return None
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
