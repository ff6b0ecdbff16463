"""Hosts as network namespaces on one machine, joined by a bridge. Needs root and iproute2."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess

_BRIDGE, _PREFIX = "gshard0", "10.77.0."


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

    def __enter__(self) -> "Network":
        self._remove()
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip link set {_BRIDGE} up")
        for host in range(self.hosts):
            space, outer, inner = self.space(host), self._outer(host), f"gshi{host}"
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

    def can_disturb(self) -> bool:
        """Returns whether this kernel can delay and lose packets."""
        try:
            self.disturb(0, 1, 0)
        except subprocess.CalledProcessError:
            return False
        self.calm(0)
        return True

    def disturb(self, host: int, milliseconds: int, loss: float) -> None:
        """Delays all packets to a host and loses some percent of them."""
        rule = f"netem delay {milliseconds}ms loss {loss}%"
        _run(f"tc qdisc add dev {self._outer(host)} root {rule}")

    def calm(self, host: int) -> None:
        """Ends `disturb`."""
        _run(f"tc qdisc del dev {self._outer(host)} root")

    def _outer(self, host: int) -> str:
        return f"gsho{host}"

    def _remove(self) -> None:
        for host in range(self.hosts):
            shutil.rmtree(f"/etc/netns/{self.space(host)}", ignore_errors=True)
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(f"ip netns del {self.space(host)}")
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(f"ip link del {self._outer(host)}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(f"ip link del {_BRIDGE}")
