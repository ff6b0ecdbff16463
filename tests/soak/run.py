"""The run that the soak runner disturbs: its directory, its starts, and what must hold of it."""

import itertools
import json
import os
import pathlib
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence

from tests.soak.processes import TrainingStart
from tests.soak.setups import ONE_DEVICE, Setup

# Far more than any wait takes; a longer one is a hang.
PATIENCE = 300.0
_POLL_SECONDS = 0.005
_RESUMING = re.compile(r"Resuming from the checkpoint of step ([\d,]+)")
_TAIL_BYTES = 2**15


class MisbehaviorError(Exception):
    """Training did something that it must not do."""


class Run:
    """A run directory and the training in it.

    Attributes:
      random: draws everything that is left to chance.
      logdir: directory of the run.
      disk: directory where the small disk is mounted; None if there is none.
      skipped: names of faults that never strike.
      damaged: steps of the checkpoints whose files were damaged.
      setup: what the next start runs on.
      start: the newest start.
    """

    def __init__(
        self, folder: pathlib.Path, flags: Sequence[str], seed: int, setups: Sequence[Setup]
    ):
        """Makes the directories of a run that has not started.

        Args:
          folder: an empty directory; the run's own is `folder/disk/run`.
          flags: flags of gshard-train that name the experiment.
          seed: of `random`.
          setups: what the starts run on.
        """
        self.random = random.Random(seed)
        self.disk: pathlib.Path | None = None
        self.damaged: set[int] = set()
        self.skipped: frozenset[str] = frozenset()
        self.setup = ONE_DEVICE[0]
        self.start: TrainingStart | None = None
        self._folder = folder
        self._flags = list(flags)
        self._setups = setups
        self._numbers = itertools.count(1)
        self.logdir = folder / "disk" / "run"
        self.outputs = folder / "outputs"
        self.outputs.mkdir(parents=True, exist_ok=True)

    @property
    def is_training(self) -> bool:
        """Whether processes of the newest start are running."""
        return self.start is not None and self.start.is_running

    def draw_setup(self) -> Setup:
        """Returns a setup for the next start: one device before the first checkpoint.

        Initial weights that runtimes draw differ by some 5e-6, since each has its own approximation
        of the normal distribution.
        """
        return self.random.choice(self._setups) if self.checkpoints() else self._setups[0]

    def begin(
        self, steps: int, setup: Setup | None = None, is_forked: bool = True
    ) -> TrainingStart:
        """Starts gshard-train on the directory, by default on the run's setup."""
        setup = setup or self.setup
        flags = [*self._flags, f"--logdir={self.logdir}", f"--steps={steps}"]
        if setup.mesh:
            flags.append(f"--compilation_cache={self._folder}/programs")
        return TrainingStart(flags, setup, self.outputs / f"{next(self._numbers):04d}", is_forked)

    def checkpoints(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending."""
        return _steps_in(self.logdir / "checkpoints")

    def unfinished_checkpoints(self) -> list[str]:
        """Returns the names of checkpoints that are being written."""
        names = _names_in(self.logdir / "checkpoints")
        return [name for name in names if "orbax-checkpoint-tmp" in name]

    def last_step(self) -> int:
        """Returns the step of the last complete row of metrics.jsonl; 0 if there is none."""
        try:
            with open(self.logdir / "metrics.jsonl", "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - _TAIL_BYTES, 0))
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            if line.endswith(b"\n") and line.startswith(b'{"step":'):
                return json.loads(line)["step"]
        return 0

    def may_resume_from(self) -> set[int]:
        """Returns the steps that the next start may resume from.

        These are the newest checkpoint without damage, and newer ones whose damage may have hit
        bytes that nobody reads.
        """
        allowed = set()
        for step in reversed(self.checkpoints()):
            allowed.add(step)
            if step not in self.damaged:
                return allowed
        return allowed | {0}

    def resumed_from(self) -> int | None:
        """Returns the step that the newest start says it resumed from; None if it did not say."""
        found = _RESUMING.search(self.start.text)
        return int(found.group(1).replace(",", "")) if found else None

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> bool:
        """Waits until a condition holds. Returns False if the training ends before.

        Raises MisbehaviorError if it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.start.is_running:
                return condition()
            if time.monotonic() > deadline:
                raise MisbehaviorError(f"waited {seconds:.0f} s for {what}")
            time.sleep(_POLL_SECONDS)
        return True

    def wait_for_step(self, step: int) -> bool:
        """Waits until a step is logged. Returns False if the training ends before."""
        return self.wait_for(lambda: self.last_step() >= step, f"step {step}")

    def wait_for_end(self, seconds: float = PATIENCE) -> list[int]:
        """Returns the exit codes of the newest start.

        Raises:
          MisbehaviorError: it does not end in this time.
        """
        codes = self.start.wait(seconds)
        if codes is None:
            raise MisbehaviorError(f"did not end within {seconds:.0f} s")
        return codes

    def has_trained(self, allowed: set[int]) -> bool:
        """Returns whether the newest start has logged a step.

        Args:
          allowed: what `may_resume_from` returned before the start.
        """
        return "compiled in" in self.start.text and self.last_step() > min(allowed)

    def note_resumption(self, allowed: set[int]) -> int:
        """Checks and returns the step that the newest start resumed from; 0 for none.

        Args:
          allowed: what `may_resume_from` returned before the start.

        Raises:
          MisbehaviorError: it is another step.
        """
        resumed = self.resumed_from() or 0
        if resumed not in allowed:
            raise MisbehaviorError(
                f"resumed from step {resumed}, not from one of {sorted(allowed)}"
            )
        self.damaged = {step for step in self.damaged if step <= resumed}
        for folder in self.logdir.glob("damaged-*"):
            shutil.rmtree(folder)
        return resumed

    def repair(self) -> None:
        """Removes what was damaged, so that the soak can go on after a problem."""
        if self.checkpoints():
            (self.logdir / "params.txt").unlink(missing_ok=True)
            newest = self.logdir / "checkpoints" / str(min(self.checkpoints()))
            shutil.copy(newest / "run" / "params.txt", self.logdir)
        for step in self.damaged:
            shutil.rmtree(self.logdir / "checkpoints" / str(step), ignore_errors=True)
        self.damaged.clear()


def _names_in(directory: pathlib.Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _steps_in(directory: pathlib.Path) -> list[int]:
    return sorted(int(name) for name in _names_in(directory) if name.isdigit())
