"""Cluster: processes, on one machine or several, that run one program together.

jax.distributed connects them and detects Slurm, Cloud TPU, GKE and Open MPI. This module adds clear
errors for wrong options, an orderly end of all processes when one of them is gone, and a main
process that prints and writes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from lingvo_gshard.core import EXIT_CODES, VERSION, jax, signals
from lingvo_gshard.wings.cluster.member import (
    DEFAULT_TIMEOUT,
    ClusterMember,
    ClusterOptions,
    find_member,
)
from lingvo_gshard.wings.cluster.peer_monitor import Departure, PeerMonitor, RollCall
from lingvo_gshard.wings.cluster.relay import Relay
from lingvo_gshard.wings.cluster.rendezvous import SECRET, bind_address, is_open_to_strangers, meet
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE, report_problem

if TYPE_CHECKING:
    from lingvo_gshard.training import Logdir

# A process that hears of the failure of another process waits this long before it ends. Its own
# main thread may be about to report the same failure.
_GRACE_SECONDS = 5.0
# A process that fails waits this long for news of the process that caused it.
_NEWS_SECONDS = 2.0
# jax reports the loss of process 0 at length; the line that helps the user comes after it.
_JAX_REPORT_SECONDS = 0.5
_SHUTDOWN_SECONDS = 3600
# Longest wait for a bucket to take the files that tell why a run ended.
_PUSH_SECONDS = 10.0
_LONGEST_ERROR = 300
_OPEN = (
    "Warning: whoever reaches `coordinator={address}` can join or end this run. Keep its port on a "
    f"private network, and set {SECRET} to the same value for all processes"
)


class Cluster:
    """This process and the others that run the program with it; possibly none.

    Used as a context manager around all that they do together. An exception that leaves it ends the
    other processes, which print why. So does the death of a process.

    Attributes:
      logdir: directory of the run, for the line that names the last checkpoint; may be None.
      roll_call: finds the process that is stuck when no step ends any more.
    """

    def __init__(self, member: ClusterMember | None = None):
        self.logdir: Logdir | None = None
        self.roll_call = RollCall(
            member.index if member else 0,
            member.count if member else 1,
            self._send,
            self._end_all,
            lambda: self.logdir.path if self.logdir else None,
        )
        self._member = member
        self._monitor: PeerMonitor | None = None
        self._relay: Relay | None = None
        self._is_leaving = threading.Event()
        self._is_closed = False
        self._exit_code = 1

    @classmethod
    def join(
        cls, options: ClusterOptions | None = None, shared: dict[str, str] | None = None
    ) -> Cluster:
        """Connects this process to the others before jax starts. Does nothing for one process.

        Args:
          options: which processes there are; by default detected.
          shared: options that all processes must have in common, by name.

        Raises:
          UserError: the options contradict each other, the coordinator cannot be reached, not all
            processes come in time, or their shared options differ.
        """
        options = options or ClusterOptions()
        member = find_member(options)
        cluster = cls(member)
        if member is not None:
            cluster._connect(member, options.coordinator_timeout, shared or {})
        return cluster

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._member.count if self._member else 1

    @property
    def index(self) -> int:
        """Number of this process, from 0."""
        return self._member.index if self._member else 0

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.index == 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._monitor is None:
            if isinstance(error, Exception):
                report_problem(_departure_of(error)[0])
            return
        if error is None:
            self._monitor.announce_done()
            jax.distributed.shutdown()
            self._close_relay()
            self._is_closed = True
            return
        if isinstance(error, Exception) and not isinstance(error, signals.StoppedError):
            # If a collective failed because another process is gone, the monitor ends this one.
            time.sleep(_NEWS_SECONDS)
        reason, code, self._exit_code = _departure_of(error)
        if not isinstance(error, signals.StoppedError | KeyboardInterrupt):
            report_problem(reason)
        self._leave(reason, code)
        # Orbax's threads may keep this process alive as long as the others live.
        timer = threading.Timer(_GRACE_SECONDS, self._end, [self._exit_code])
        timer.daemon = True
        timer.start()

    def _connect(self, member: ClusterMember, timeout: float, shared: dict[str, str]) -> None:
        if member.index == 0:
            # Its name is resolved once, so that all that listens does so at the same address.
            member = dataclasses.replace(member, bind_address=bind_address(member))
        versions = {"lingvo_gshard": VERSION, "jax": jax.__version__}
        connections, token = meet(member, versions | shared, timeout)
        if member.index == 0 and is_open_to_strangers(member):
            print(_OPEN.format(address=member.address), file=sys.stderr)
        _delay_aborts()
        self._monitor = PeerMonitor(
            member.index, connections, self._on_departure, self._end, self.roll_call.on_message
        )
        self._relay = Relay(member, token)
        atexit.register(self._at_exit)
        signals.State.before_abrupt_end.append(self._at_abrupt_end)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # jax's preemption service would take SIGTERM away from core/signals.py.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self._relay.address,
            num_processes=member.count,
            process_id=member.index,
            local_device_ids=member.local_devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=self._relay.address if member.index == 0 else None,
            initialization_timeout=max(int(timeout), DEFAULT_TIMEOUT),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )

    def _leave(self, reason: str, code: int) -> None:
        """Tells the other processes that this process leaves. It then ignores their departures."""
        self._is_leaving.set()
        assert self._monitor is not None
        self._monitor.announce_departure(Departure(self.index, reason, code))

    def _send(self, process: int | None, message: msgspec.Struct) -> None:
        if self._monitor is not None:
            self._monitor.send(process, message)

    def _end_all(self, process: int, reason: str) -> None:
        """Ends all processes because one of them is stuck."""
        departure = Departure(process, reason, 1, is_sudden=True)
        self._is_leaving.set()
        report_problem(reason, is_consequence=process != self.index)
        sys.stdout.flush()
        os.write(2, f"\n{self._describe(departure)}\n".encode())
        if self._monitor is not None:
            self._monitor.announce_departure(departure)
        self._push_files()
        if self._monitor is None:
            signals.end_abruptly(1)
        self._end(1)

    def _push_files(self) -> None:
        """Copies the stacks of all processes to the run's bucket, if it has one that answers."""

        def push() -> None:
            with contextlib.suppress(Exception):
                if self.logdir is not None:
                    self.logdir.push()

        thread = threading.Thread(target=push, daemon=True)
        thread.start()
        thread.join(_PUSH_SECONDS)

    def _at_exit(self) -> None:
        """Ends the process before jax would wait for the others once more."""
        if self._is_closed:
            return
        if not self._is_leaving.is_set():
            self._leave("ended early", 1)
        self._end(self._exit_code)

    def _at_abrupt_end(self) -> None:
        """Tells the others that a signal ends this process."""
        if not self._is_closed:
            self._leave("was stopped without saving", signals.State.exit_code)

    def _on_departure(self, departure: Departure) -> bool:
        """Prints that a process is gone; returns False if this one is already ending by itself."""
        is_urgent = departure.is_sudden or departure.exit_code in EXIT_CODES.values()
        if self._is_leaving.wait(0.0 if is_urgent else _GRACE_SECONDS):
            return False
        if departure.process == 0 and departure.is_sudden:
            time.sleep(_JAX_REPORT_SECONDS)
        report_problem(self._describe(departure), is_consequence=True)
        sys.stdout.flush()
        os.write(2, f"\n{self._describe(departure)}\n".encode())
        return True

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _end(self, code: int) -> None:
        """Ends this process at once, without waiting for jax and Orbax."""
        sys.stdout.flush()
        sys.stderr.flush()
        # Another thread may be doing the same.
        with contextlib.suppress(Exception):
            self._close_relay()
        os._exit(code)

    def _describe(self, departure: Departure) -> str:
        who = f"process {departure.process} of {self.size}" if self.size > 1 else "training"
        if REPORT_FILE in os.environ:
            return (
                f"{who} {departure.reason}; the agents go on from the newest state that they have"
            )
        text = f"{who} {departure.reason}; continue with the same command"
        if self.logdir is None:
            return text
        step = self.logdir.last_step
        return text + (f" (last checkpoint: step {step:,})" if step else " (no checkpoint yet)")


def _departure_of(error: BaseException) -> tuple[str, int, int]:
    """Returns the reason in words, the exit code for the others, and this process's own."""
    if isinstance(error, signals.StoppedError):
        code = EXIT_CODES[str(error)]
        return f"was stopped ({error}) before the first step", code, code
    if isinstance(error, KeyboardInterrupt):
        return "was stopped without saving", 1, 130
    if isinstance(error, SystemExit):
        return f"ended with exit code {error.code}", 1, int(error.code or 0)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"failed ({type(error).__name__}: {first_line[:_LONGEST_ERROR]})", 1, 1


def _delay_aborts() -> None:
    """Makes a thread that aborts this process sleep for some seconds first.

    jax aborts at once when process 0 is gone. In these seconds the monitor prints why and ends the
    process in order. The signal handler is a C function, since a Python handler would wait for the
    main thread. The handler is `sleep`, which takes the number of the signal, 6, as seconds.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
