"""A real Slurm with two nodes on this machine, for tests.

It needs root and Debian's slurmctld, slurmd, slurm-client and munge, which it installs if apt-get
is there. The nodes n1 and n2 are daemons with ports of their own. While it runs, /etc/hosts names
them.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

NODES = ("n1", "n2")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_HOSTS, _LINE = pathlib.Path("/etc/hosts"), f"127.0.0.1 {' '.join(NODES)}\n"
_SECONDS = 30.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SlurmctldPort={ports[0]}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


def problem() -> str | None:
    """Returns why there can be no Slurm here; installs it if it is missing."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    if all(map(shutil.which, _PROGRAMS)):
        return None
    if shutil.which("apt-get") is None:
        return "Slurm is not installed, and there is no apt-get"
    command = ["apt-get", "install", "-y", "--no-install-recommends", *_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"apt-get cannot install Slurm: {done.stderr[-300:]}" if done.returncode else None


class Slurm:
    """The running daemons, and the environment in which commands find them."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def lose(self, node: str) -> None:
        """Kills a node's daemon and everything that runs on it, as a loss of power does."""
        pids = [int((self.folder / f"d-{node}.pid").read_text())]
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"SLURMD_NODENAME={node}\0".encode() in path.read_bytes():
                    pids.append(int(path.parent.name))
        for line in self.run("ps", "-eo", "pid=,args=").splitlines():
            pid, _, words = line.strip().partition(" ")
            if words.startswith("slurmstepd") and self._is_of(int(pid), node):
                pids.append(int(pid))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_of(self, pid: int, node: str) -> bool:
        with contextlib.suppress(OSError):
            links = (os.readlink(one) for one in pathlib.Path(f"/proc/{pid}/fd").iterdir())
            return any(f"d-{node}.log" in link or f"spool-{node}" in link for link in links)
        return False


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Slurm]:
    """Starts a Slurm and ends it."""
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [one.getsockname()[1] for one in opened]
    host = socket.gethostname().partition(".")[0]
    text = _CONF.format(folder=folder, host=host, ports=ports)
    (folder / "slurm.conf").write_text(text)
    slurm, hosts = Slurm(folder), _HOSTS.read_text()
    if _LINE not in hosts:
        # Not renamed into place: in a container the file is mounted.
        _HOSTS.write_text(hosts.rstrip("\n") + "\n" + _LINE)
    munge = _start_munge()
    try:
        slurm.run("slurmctld", "-f", f"{folder}/slurm.conf")
        time.sleep(1.0)
        for node in NODES:
            slurm.run("slurmd", "-N", node, "-f", f"{folder}/slurm.conf")
        deadline = time.monotonic() + _SECONDS
        while slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D") != "2":
            assert time.monotonic() < deadline, slurm.run("sinfo")
            time.sleep(0.2)
        yield slurm
    finally:
        for name in ("ctld", *(f"d-{node}" for node in NODES)):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        if munge is not None:
            munge.terminate()
        _HOSTS.write_text(hosts)


def _start_munge() -> subprocess.Popen | None:
    """Starts the daemon that Slurm's messages are signed by, unless it runs."""
    done = subprocess.run(["munge", "-n"], capture_output=True)
    if done.returncode == 0:
        return None
    folder = pathlib.Path("/run/munge")
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, "munge")
    return subprocess.Popen(["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground"])
