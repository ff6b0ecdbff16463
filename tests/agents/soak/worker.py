"""Trains the toy state of tests/cluster/cluster_run.py, with snapshots and a probe.

    python -m tests.agents.soak.worker LOGDIR STEPS --mesh=data=4 --coordinator=...

The agents of the soak start it. It keeps its state as gshard-train does: snapshots in memory every
few steps, and checkpoints on the disk more seldom.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from absl import flags

from lingvo_gshard.core import processes
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.signals import EXIT_CODES, StoppedError, StopRequest
from lingvo_gshard.tools.flags.definitions import define
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.cluster.cluster import Cluster
from lingvo_gshard.wings.cluster.member import ClusterOptions
from lingvo_gshard.wings.cluster.rendezvous import NotMetError
from lingvo_gshard.wings.cluster.worker_report import report_problem, report_step
from lingvo_gshard.wings.services import snapshots
from lingvo_gshard.wings.services.snapshots import SnapshotStore, snapshot_run
from lingvo_gshard.wings.services.step_reporter import probe_seconds
from tests import tiny
from tests.cluster.cluster_run import first_state, like, make_step

SNAPSHOT_EVERY = 50
CHECKPOINT_EVERY = 500
_STEP_SECONDS = 0.05
_PROBE_EVERY = 50
_SAVE_SECONDS = 20.0


class Training:
    """One process's part of the training."""

    def __init__(self, logdir: Logdir):
        self._store = CheckpointStore(logdir.checkpoints, keep=2)
        run = snapshot_run(logdir)
        newest = self._store.peek()
        kind, found = "snapshot", snapshots.restore(run, newest, like())
        if found is None:
            kind, found = "checkpoint", self._store.restore(like())
        self._snapshots = SnapshotStore(run)
        self._step, self._state, self._take_step = 0, first_state(), make_step()
        if found is not None:
            self._step = found.step
            self._state = NestedMap(
                {
                    part: unflatten(like()[part], getattr(found, part), part)
                    for part in ("theta", "moments")
                }
            )
            _say(f"resumes from the {kind} of step {found.step}")

    def run(self, steps: int, stop: StopRequest) -> int:
        """Takes the steps, saves and ends. Returns the exit code."""
        theta, moments, probe = self._state.theta, self._state.moments, None
        while self._step < steps and not stop.agreed:
            stop.announce()
            if self._step % _PROBE_EVERY == 2:
                probe = probe_seconds()
            theta.w, moments.w.row, mean = self._take_step(theta.w, moments.w.row)
            mean.block_until_ready()
            self._step += 1
            report_step(self._step, 0.0, probe)
            _say(f"step {self._step} at {time.monotonic():.3f}")
            if self._step % SNAPSHOT_EVERY == 0 and self._snapshots.is_open:
                self._take_snapshot()
            if self._step % CHECKPOINT_EVERY == 0:
                self._save()
            time.sleep(_STEP_SECONDS)
        self._snapshots.finish()
        self._store.finish()
        if self._step not in self._store.steps:
            self._save()
        assert self._store.finish() and self._store.steps[-1] == self._step
        self._store.close()
        return EXIT_CODES[stop.agreed] if stop.agreed else 0

    def _take_snapshot(self) -> None:
        self._snapshots.save(self._step, self._state, {"index": self._step}, "", None)
        if problem := self._snapshots.pop_problem():
            print(f"Warning: a snapshot could not be written ({problem})", flush=True)

    def _save(self) -> None:
        with _limited_save():
            self._store.save(
                self._step, self._state, {"index": self._step}, f"name : {self._step}\n"
            )


@contextlib.contextmanager
def _limited_save() -> Iterator[None]:
    """Ends the process if a save takes too long, as gshard-train does after `run.save_seconds`.

    Orbax takes a jump of the clock for a save that has failed, and the other processes wait.
    """

    def end() -> None:
        report_problem(f"a save did not end within {_SAVE_SECONDS:g} s")
        os._exit(1)

    timer = threading.Timer(_SAVE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    if processes.is_main():
        print(text, flush=True)


def main(argv: list[str]) -> int:
    logdir, steps = Logdir(argv[1]), int(argv[2])
    values = flags.FlagValues()
    define(values, **option_flags(ClusterOptions()))
    # The devices of all processes are the mesh.
    flags.DEFINE_string("mesh", "", "Unused.", flag_values=values)
    values(argv[:1] + argv[3:])
    try:
        with (
            StopRequest() as stop,
            Cluster.join(read_options(values, ClusterOptions), {"STEPS": str(steps)}) as cluster,
        ):
            cluster.logdir = logdir
            with logdir.claim(tiny.experiment_params()):
                training = Training(logdir)
                stop.finishing = True
                return training.run(steps, stop)
    except StoppedError as stopped:
        return EXIT_CODES[str(stopped)]
    except ValueError as error:
        report_problem(str(error), is_consequence=isinstance(error, NotMetError))
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
