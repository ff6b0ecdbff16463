"""Hosts as network namespaces on one machine, joined by a bridge. Needs root and iproute2."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys

_BRIDGE, _PREFIX = "gshard0", "10.77.0."
# A bridge for the one host whose link is disturbed, and the two ends of the link.
_LINK_BRIDGE, _LINK = "gshard1", ("gshl0", "gshl1")


def problem() -> str | None:
    """Returns why there can be no namespaces here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 is not installed"
    return None


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


class Network:
    """Namespaces of some hosts, each with an address of its own."""

    def __init__(self, hosts: int):
        self.hosts = hosts
        self._link: subprocess.Popen | None = None

    def __enter__(self) -> "Network":
        self._remove()
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip link set {_BRIDGE} up")
        for host in range(self.hosts):
            space, outer, inner = self.space(host), self._outer(host), self._inner(host)
            _run(f"ip netns add {space}")
            # Gloo listens where the machine's own name leads.
            names = pathlib.Path("/etc/netns", space, "hosts")
            names.parent.mkdir(parents=True, exist_ok=True)
            own = f"{self.address(host)} {socket.gethostname()}"
            names.write_text(f"127.0.0.1 localhost\n{own}\n")
            _run(f"ip link add {outer} type veth peer name {inner}")
            _run(f"ip link set {inner} netns {space}")
            _run(f"ip link set {outer} master {_BRIDGE}")
            _run(f"ip link set {outer} up")
            _run(f"ip netns exec {space} ip addr add {self.address(host)}/24 dev {inner}")
            _run(f"ip netns exec {space} ip link set {inner} up")
            _run(f"ip netns exec {space} ip link set lo up")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def space(self, host: int) -> str:
        """Name of a host's namespace."""
        return f"gshard-host-{host}"

    def address(self, host: int) -> str:
        """Address of a host."""
        return f"{_PREFIX}{host + 1}"

    def command(self, host: int) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self.space(host)]

    def cut(self, host: int) -> None:
        """Cuts a host off from the others."""
        _run(f"ip link set {self._outer(host)} down")

    def join(self, host: int) -> None:
        """Joins a host again."""
        _run(f"ip link set {self._outer(host)} up")

    @property
    def has_netem(self) -> bool:
        """Whether this kernel can delay and lose packets by itself."""
        try:
            self._netem(0, 0.001, 0.0)
        except subprocess.CalledProcessError:
            return False
        self._end_netem(0)
        return True

    def disturb(self, host: int, seconds: float, loss: float, changed_port: int = 0) -> None:
        """Delays all packets from and to a host, and loses or changes some of them.

        Args:
          host: number of the host.
          seconds: delay in each direction.
          loss: probability that a packet is lost.
          changed_port: port of the host; what the host sends from it is changed. 0 for none.
        """
        if self.has_netem and not changed_port:
            self._netem(host, seconds, loss)
            return
        near, far = _LINK
        command = [sys.executable, "-m", "tests.agents.soak.link", near, far]
        self._link = subprocess.Popen(
            [
                *(*command, f"--delay={seconds}", f"--loss={loss}"),
                f"--changed_port={changed_port}",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._link.stdout is not None and self._link.stdout.readline()
        # The host moves to a bridge of its own, and the link joins both bridges.
        _run(f"ip link add {_LINK_BRIDGE} type bridge")
        for device, bridge in ((near, _LINK_BRIDGE), (far, _BRIDGE)):
            _run(f"ip link set {device} master {bridge}")
            _run(f"ip link set {device} up")
        _run(f"ip link set {_LINK_BRIDGE} up")
        _run(f"ip link set {self._outer(host)} master {_LINK_BRIDGE}")

    def calm(self, host: int) -> None:
        """Ends `disturb`."""
        if self._link is None:
            self._end_netem(host)
            return
        _run(f"ip link set {self._outer(host)} master {_BRIDGE}")
        self._end_link()

    def _netem(self, host: int, seconds: float, loss: float) -> None:
        rule = f"root netem delay {seconds * 1000:g}ms loss {loss * 100:g}%"
        _run(f"tc qdisc add dev {self._outer(host)} {rule}")
        _run(f"ip netns exec {self.space(host)} tc qdisc add dev {self._inner(host)} {rule}")

    def _end_netem(self, host: int) -> None:
        _run(f"tc qdisc del dev {self._outer(host)} root")
        _run(f"ip netns exec {self.space(host)} tc qdisc del dev {self._inner(host)} root")

    def _end_link(self) -> None:
        if self._link is not None:
            self._link.kill()
            self._link.communicate()
            self._link = None
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(f"ip link del {_LINK_BRIDGE}")

    def _outer(self, host: int) -> str:
        return f"gsho{host}"

    def _inner(self, host: int) -> str:
        return f"gshi{host}"

    def _remove(self) -> None:
        self._end_link()
        for host in range(self.hosts):
            shutil.rmtree(f"/etc/netns/{self.space(host)}", ignore_errors=True)
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(f"ip netns del {self.space(host)}")
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(f"ip link del {self._outer(host)}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(f"ip link del {_BRIDGE}")
