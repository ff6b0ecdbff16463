"""ClusterMember: which process of a cluster this one is, from options or from the environment."""

from __future__ import annotations

import dataclasses
import ipaddress
import os

from lingvo_gshard.core import Options, UserError, option, whole_number
from lingvo_gshard.core.lazy import clusters

DEFAULT_TIMEOUT = 60
_FIELDS = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class ClusterOptions(Options):
    """The processes that run a program together. Slurm, Cloud TPU and GKE set the first three.

    >>> cluster = gshard.ClusterOptions("10.0.0.1:1234", num_processes=4, process_id=0)
    >>> gshard.RuntimeOptions(mesh="data=4", cluster=cluster).given()["num_processes"]
    4
    """

    coordinator: str | None = option(
        None,
        "host:port of process 0, where the processes meet. Detected under Slurm, on Cloud TPU and "
        "on GKE.",
    )
    num_processes: int | None = option(None, "Number of processes.")
    process_id: int | None = option(None, "Number of this process, from 0 to num_processes - 1.")
    coordinator_timeout: int = option(
        DEFAULT_TIMEOUT, "Seconds to wait for the other processes.", minimum=1
    )
    coordinator_bind_address: str | None = option(
        None, "IP address at which process 0 listens; by default the coordinator's. 0.0.0.0 is all."
    )


@dataclasses.dataclass(frozen=True)
class ClusterMember:
    """One process of a cluster.

    Attributes:
      index: number of this process, from 0.
      local_devices: ids of the devices that jax shall use here; None: all.
      bind_address: the address that process 0 listens at; None: the address of `host`.
    """

    host: str
    port: int
    count: int
    index: int
    local_devices: list[int] | None = None
    bind_address: str | None = None

    @property
    def address(self) -> str:
        """host:port of process 0, as the option `coordinator` has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_member(options: ClusterOptions) -> ClusterMember | None:
    """Returns which member this process is; None if it runs alone.

    Raises:
      UserError: options are missing, contradict each other or are out of range.
    """
    given = {name: getattr(options, name) for name in _FIELDS}
    coordinator, num_processes, process_id = given.values()
    missing = [f"`{name}`" for name, value in given.items() if value is None]
    local_devices = None
    if len(missing) == 3:
        coordinator, num_processes, process_id, local_devices = _detect(options.coordinator_timeout)
        if num_processes is None:
            return None
    elif num_processes is not None and num_processes < 1:
        raise UserError(f"`num_processes={num_processes}` is out of range: at least 1 is expected")
    elif missing and (num_processes != 1 or process_id):
        present = " ".join(f"`{k}={v}`" for k, v in given.items() if v is not None)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{' and '.join(missing)} {verb} missing; {present} needs all three. Leave all out "
            "under Slurm, on Cloud TPU and on GKE, which set them"
        )
    if num_processes == 1 and not process_id:
        return None
    assert num_processes is not None and process_id is not None
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"`process_id={process_id}` is out of range: with `num_processes={num_processes}`, "
            f"0 to {num_processes - 1} is expected"
        )
    host, port = _host_and_port(coordinator)
    bind_address = options.coordinator_bind_address
    if bind_address is not None:
        _check_address(bind_address)
    return ClusterMember(host, port, num_processes, process_id, local_devices, bind_address)


def _check_address(address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UserError(
            f"`coordinator_bind_address={address}` is no IP address, such as 0.0.0.0 or 10.0.0.1"
        ) from None


def _detect(timeout: float) -> tuple:
    """Asks jax for its cluster: address, process count, process index and local devices.

    All are None outside a cluster. jax.distributed.initialize detects the same but returns nothing,
    and the rendezvous comes before it.
    """
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        detected = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            given, None, None, None, None, int(timeout)
        )
    except Exception as error:  # Each kind of cluster has errors of its own.
        raise UserError(
            "`coordinator`, `num_processes` and `process_id` are not given, and jax cannot read "
            f"them from the cluster that it detects ({error}); `num_processes=1` runs alone"
        ) from error
    return (None,) * 4 if detected[1] is None else detected


def _host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    number = whole_number(port) or 0
    if not host or not 0 < number < 65536:
        raise UserError(f"`coordinator={coordinator}` is not host:port, such as 10.0.0.1:8476")
    return host.removeprefix("[").removesuffix("]"), number
