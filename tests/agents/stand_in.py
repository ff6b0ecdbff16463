"""A worker that starts in no time, in place of gshard-train.

    python -S stand_in.py DIRECTORY STEPS FAULTS --coordinator=... --num_processes=... ...

All workers of a round take each step together, through files. A step changes a number by the step's
own number, so that the last number shows which steps were taken, and in which order. Every fifth
step is saved, or every so many as STAND_IN_SAVE_EVERY says. Every 40th step, each process writes a
part of a snapshot. FAULTS lists what happens to a process before a step, separated by commas:
`1:7:kill` kills process 1 before its 7th step. A fault happens once, unless its name has a `!`.

It imports nothing of the package, whose imports take longer than a whole test.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time

SAVE_EVERY = int(os.environ.get("STAND_IN_SAVE_EVERY", "5"))
# Agents need some signs of life to copy a part.
SNAPSHOT_EVERY = 40
STEP_SECONDS = 0.02


def number_after(steps: int) -> str:
    """Returns the number of a run without failures."""
    number = ""
    for step in range(1, steps + 1):
        number = next_number(number, step)
    return number


def next_number(number: str, step: int) -> str:
    return hashlib.sha256(f"{number} {step}".encode()).hexdigest()[:16]


def replace(path: pathlib.Path, text: str) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    os.replace(new, path)


class Worker:
    """One process of a round."""

    def __init__(self, arguments: list[str]):
        directory, steps, faults = arguments[:3]
        given = dict(word.removeprefix("--").split("=", 1) for word in arguments[3:])
        self.directory, self.steps = pathlib.Path(directory), int(steps)
        self.faults = [fault.split(":") for fault in faults.split(",") if fault]
        self.index, self.count = int(given["process_id"]), int(given["num_processes"])
        self.mesh = given.get("mesh", "")
        self.meeting = self.directory / given["coordinator"].replace(":", "_")
        self.meeting.mkdir(exist_ok=True)
        self.is_asked = False
        signal.signal(signal.SIGTERM, self.ask)
        self.last_step: int | None = None
        self.serial, self.parts = 0, []

    def ask(self, *_: object) -> None:
        self.is_asked = True

    def report(self, problem: str = "", is_consequence: bool = False) -> None:
        content = {"problem": problem, "is_consequence": is_consequence, "step": self.last_step}
        replace(pathlib.Path(os.environ["GSHARD_WORKER_REPORT"]), json.dumps(content))

    def run(self) -> int:
        step, number = self.restore()
        while step < self.steps:
            self.suffer(step + 1)
            if self.meet(step + 1):
                break
            time.sleep(STEP_SECONDS)
            step, number = step + 1, next_number(number, step + 1)
            self.last_step = step
            self.report()
            if step % SNAPSHOT_EVERY == 0:
                self.take_snapshot(step, number)
            if step % SAVE_EVERY == 0:
                self.save(step, number)
        self.save(step, number)
        return 0 if step == self.steps else 143

    def restore(self) -> tuple[int, str]:
        """Returns the newest state, and notes whether all parts of a snapshot had it."""
        saved = self.directory / "saved.json"
        step, number = json.loads(saved.read_text()) if saved.exists() else (0, "")
        paths = [path for path in os.environ["GSHARD_SNAPSHOT"].split(os.pathsep) if path]
        parts = {pathlib.Path(path).read_text() for path in paths}
        if len(parts) == 1 and (found := json.loads(parts.pop()))[0] > step:
            step, number = found
            with (self.directory / "restored").open("a") as log:
                log.write(f"{step} {len(paths)} {self.count}\n")
        return step, number

    def take_snapshot(self, step: int, number: str) -> None:
        """Writes a part, and deletes the part before the last one."""
        folder = pathlib.Path(os.environ["GSHARD_SNAPSHOTS"])
        self.serial += 1
        name = f"{os.environ['GSHARD_ROUND']}-{self.serial}-{step}-{self.count}-{self.index}.part"
        replace(folder / name, json.dumps([step, number]))
        self.parts.append(folder / name)
        if len(self.parts) > 2:
            self.parts.pop(0).unlink(missing_ok=True)

    def save(self, step: int, number: str) -> None:
        if self.index == 0:
            replace(self.directory / "saved.json", json.dumps([step, number]))
            with (self.directory / "log").open("a") as log:
                log.write(f"{step} {self.count} {self.mesh}\n")

    def suffer(self, step: int) -> None:
        for process, at, what in self.faults:
            mark = self.directory / f"fault-{process}-{at}-{what.rstrip('!')}"
            is_here = (int(process), int(at)) == (self.index, step)
            if not is_here or (mark.exists() and not what.endswith("!")):
                continue
            mark.touch()
            if what.startswith("fail"):
                self.report(f"failed (ValueError: the batch of step {step} is damaged)")
                sys.exit(1)
            os.kill(os.getpid(), getattr(signal, f"SIG{what.rstrip('!').upper()}"))

    def meet(self, step: int) -> bool:
        """Waits for all processes. Returns whether one of them was asked to stop."""
        replace(self.meeting / f"{self.index}", json.dumps([step, self.is_asked, os.getpid()]))
        replace(self.meeting / f"{self.index}-{step}", json.dumps(self.is_asked))
        for other in range(self.count):
            path = self.meeting / f"{other}-{step}"
            while not path.exists():
                self.check(other)
                time.sleep(0.005)
        return any(
            json.loads((self.meeting / f"{other}-{step}").read_text())
            for other in range(self.count)
        )

    def check(self, other: int) -> None:
        """Ends this process if another one is gone."""
        path = self.meeting / f"{other}"
        if not path.exists():
            return
        pid = json.loads(path.read_text())[2]
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            self.report(f"process {other} of {self.count} is gone", is_consequence=True)
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(Worker(sys.argv[1:]).run())
