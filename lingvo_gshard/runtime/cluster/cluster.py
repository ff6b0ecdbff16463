"""The cluster: several processes, perhaps on several machines, that run one program together.

jax.distributed connects them, and it finds Slurm, Cloud TPU, GKE and Open MPI by itself. Around it
stand what a user needs: mistakes in the flags told in words, all processes ended in order when one
of them is gone, and one of them, the main one, that prints and writes.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time

import jax
from jax._src import clusters

import lingvo_gshard
from lingvo_gshard.runtime.cluster.lifeline import Lifeline, Loss
from lingvo_gshard.runtime.cluster.roll_call import Place, call_roll
from lingvo_gshard.training.logdir import Logdir
from lingvo_gshard.training.signals import StoppedError

DEFAULT_TIMEOUT = 60
_FIELDS = ("coordinator", "num_processes", "process_id")

# How long a process that heard of another's failure waits for its own main thread, which may be
# about to fail in the same way; and how long one that fails waits for news of who is the cause.
_GRACE_SECONDS = 5.0
_NEWS_SECONDS = 2.0
_SHUTDOWN_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Which processes run the program together. Slurm, Cloud TPU and GKE set the first three.

    Attributes:
      coordinator: host:port of process 0, where the processes meet.
      num_processes: number of processes.
      process_id: number of this process, from 0 to `num_processes` - 1.
      coordinator_timeout: seconds to wait for the other processes.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_timeout: float = DEFAULT_TIMEOUT


class Cluster:
    """This process's place among those that run the program together; one alone has no others.

    Used as a context manager around all that they do together. Leaving it by an error ends the
    other processes, too, with a line that says why; a process that dies ends them as well.
    """

    def __init__(self, place: Place | None = None):
        self._place = place
        self._line: Lifeline | None = None
        self._leaving = threading.Event()
        self._closed = False
        self._own_code = 1
        # Where checkpoints are, for the line that says how to go on.
        self.logdir: Logdir | None = None

    @classmethod
    def join(
        cls, options: ClusterOptions | None = None, facts: dict[str, str] | None = None
    ) -> Cluster:
        """Connects this process to the others before jax starts; does nothing for a single process.

        Args:
          options: where and which the processes are; by default detected.
          facts: options that all processes must share, by name.

        Raises:
          ValueError: the options contradict each other, the coordinator cannot be reached, or not
            all processes come in time.
        """
        options = options or ClusterOptions()
        place, local_devices = _place(options)
        cluster = cls(place)
        if place is not None:
            cluster._connect(local_devices, options.coordinator_timeout, facts or {})
        return cluster

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._place.count if self._place else 1

    @property
    def index(self) -> int:
        """The number of this process, from 0."""
        return self._place.index if self._place else 0

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes what all share."""
        return self.index == 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._line is None:
            return
        if error is None:
            self._line.say_done()
            jax.distributed.shutdown()
            self._closed = True
            return
        if isinstance(error, Exception) and not isinstance(error, StoppedError):
            # Where a collective failed since another is gone, the lifeline ends this process.
            time.sleep(_NEWS_SECONDS)
        how, code, self._own_code = _how_it_left(error)
        self._leave(how, code)
        # Orbax's threads may keep this process from its end as long as the others live.
        timer = threading.Timer(_GRACE_SECONDS, _end, [self._own_code])
        timer.daemon = True
        timer.start()

    def _connect(self, local_devices: list[int] | None, timeout: float, facts: dict) -> None:
        facts = {"lingvo_gshard": lingvo_gshard.__version__, "jax": jax.__version__, **facts}
        connections = call_roll(self._place, facts, timeout)
        _slow_down_aborts()
        self._line = Lifeline(self.index, connections, self._on_loss, _end)
        atexit.register(self._at_exit)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would take SIGTERM away from training/signals.py.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self._place.address,
            num_processes=self._place.count,
            process_id=self._place.index,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=max(int(timeout), DEFAULT_TIMEOUT),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )

    def _leave(self, how: str, code: int) -> None:
        """Tells the others that this process leaves them, and that it ends by itself."""
        self._leaving.set()
        self._line.say_left(how, code)

    def _at_exit(self) -> None:
        """Ends the process where jax would wait for the others once more."""
        if self._closed:
            return
        if not self._leaving.is_set():
            self._leave("ended early", 1)
        _end(self._own_code)

    def _on_loss(self, loss: Loss) -> bool:
        """Says that a process is lost; False where this one is already ending by itself."""
        if self._leaving.wait(0.0 if loss.sudden or loss.code == 0 else _GRACE_SECONDS):
            return False
        if loss.process == 0 and loss.sudden:
            # jax reports this at length; what helps the reader comes last.
            time.sleep(0.5)
        words = f"\n{self._describe(loss)}\n"
        sys.stdout.flush()
        os.write(2, words.encode())
        return True

    def _describe(self, loss: Loss) -> str:
        text = f"process {loss.process} of {self.size} {loss.how}; go on with the same command"
        if self.logdir is None:
            return text
        step = self.logdir.last_step
        return text + (f" (last checkpoint: step {step:,})" if step else " (no checkpoint yet)")


def _place(options: ClusterOptions) -> tuple[Place | None, list[int] | None]:
    """Returns this process's place, None if it is alone, and jax's choice of its devices."""
    given = {name: getattr(options, name) for name in _FIELDS}
    coordinator, num_processes, process_id = given.values()
    missing = [f"--{name}" for name, value in given.items() if value is None]
    local_devices = None
    if len(missing) == 3:
        coordinator, num_processes, process_id, local_devices = _detect(options.coordinator_timeout)
        if num_processes is None:
            return None, None
    elif num_processes is not None and num_processes < 1:
        raise ValueError(f"--num_processes={num_processes} is out of range: at least 1 is expected")
    elif missing and (num_processes != 1 or process_id):
        there = " ".join(f"--{k}={v}" for k, v in given.items() if v is not None)
        raise ValueError(
            f"{' and '.join(missing)} missing beside {there}: all three are expected, or none "
            "where Slurm, Cloud TPU or GKE tells them"
        )
    if process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id={process_id} is out of range: with --num_processes={num_processes}, "
            f"0 to {num_processes - 1} is expected"
        )
    if num_processes == 1:
        return None, None
    host, port = _host_and_port(coordinator)
    return Place(host, port, num_processes, process_id), local_devices


def _detect(timeout: float) -> tuple:
    """Asks jax for the cluster it is in: address, count, index, local devices; all None if in none.

    jax.distributed.initialize does the same but does not tell, and the roll call comes before it.
    """
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            given, None, None, None, None, int(timeout)
        )
    except Exception as error:  # Each kind of cluster has errors of its own.
        raise ValueError(
            "--coordinator, --num_processes and --process_id are not given, and the cluster that "
            f"jax found here does not tell them ({error}); --num_processes=1 runs alone"
        ) from error
    if found[1] is None:
        return None, None, None, None
    return found


def _host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator={coordinator} is not host:port, such as 10.0.0.1:8476")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _how_it_left(error: BaseException) -> tuple[str, int, int]:
    """Returns how in words, the exit code for the others, and the own one."""
    if isinstance(error, StoppedError):
        return f"was stopped ({error}) before the first step", 0, 0
    if isinstance(error, KeyboardInterrupt):
        return "was told twice to stop", 1, 130
    if isinstance(error, SystemExit):
        return f"ended with exit code {error.code}", 1, int(error.code or 0)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"failed ({type(error).__name__}: {first_line[:300]})", 1, 1


def _slow_down_aborts() -> None:
    """Lets a thread that aborts the process sleep for some seconds first.

    jax aborts at once where process 0 is gone; meanwhile the lifeline says so and ends the process.
    The handler must be C's, as Python's would wait for the main thread: sleep itself takes the
    signal's number, 6, for its seconds.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _end(code: int) -> None:
    """Ends this process at once, without what jax and Orbax would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
