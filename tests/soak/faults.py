"""Faults that end the training, or happen while it runs.

A fault's `strike` returns how it ended, in a few words. It raises MisbehaviorError if the training
did what it must not do.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import signal
import socket
import time
from collections.abc import Callable

from tests.soak import small_disk
from tests.soak.experiment import EVALUATE_EVERY
from tests.soak.run import PATIENCE, MisbehaviorError, Run

_MOST_STEPS = 40
# What strangers say to the port where processes meet.
_WORDS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"process": 0, "options": {}, "nonce": ""}\n',
    b"\0" * 99,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
      name: what is shown in the table.
      strike: does it to a run and returns how it ended.
      weight: how often it is drawn, relative to others.
      needs: what must hold for it to be possible.
    """

    name: str
    strike: Callable[[Run], str]
    weight: float = 1.0
    needs: Callable[[Run], bool] = lambda run: True


def _steps_later(run: Run) -> None:
    """Waits for a random step, and then for a random part of a step."""
    run.wait_for_step(run.last_step() + run.random.randint(1, _MOST_STEPS // run.setup.processes))
    time.sleep(run.random.random() * 0.03)


def _kill(run: Run) -> str:
    """Kills the processes, one of several or all at once; the others must end by themselves."""
    several = len(run.start.pids)
    victim = run.random.randrange(several) if run.random.random() < 0.7 else None
    run.start.signal(signal.SIGKILL, victim)
    codes = run.wait_for_end()
    expected = {-signal.SIGKILL} if several == 1 else {-signal.SIGKILL, 1}
    if not set(codes) <= expected or -signal.SIGKILL not in codes:
        raise MisbehaviorError(f"exit codes {codes} after SIGKILL")
    return "killed"


def _kill_in_start_up(run: Run) -> str:
    time.sleep(run.random.random() * 2.0)
    return _kill(run)


def _kill_in_compilation(run: Run) -> str:
    run.wait_for(lambda: "parameters" in run.start.text, "the summary")
    time.sleep(run.random.random() * 3.0)
    return _kill(run)


def _kill_in_a_step(run: Run) -> str:
    _steps_later(run)
    return _kill(run)


def _kill_in_a_checkpoint(run: Run) -> str:
    _steps_later(run)
    run.wait_for(lambda: bool(run.unfinished_checkpoints()), "a checkpoint")
    time.sleep(run.random.random() * 0.05)
    return _kill(run)


def _ask_to_stop(number: signal.Signals) -> Callable[[Run], str]:
    def strike(run: Run) -> str:
        if run.random.random() < 0.8:
            _steps_later(run)
        return _stop(run, number)

    return strike


def _stop_in_compilation(run: Run) -> str:
    run.wait_for(lambda: "parameters" in run.start.text, "the summary")
    time.sleep(run.random.random() * 3.0)
    return _stop(run, run.random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


def _stop(run: Run, number: signal.Signals) -> str:
    """Sends a signal to one of the processes, which must end them all in order."""
    run.start.signal(number, run.random.randrange(len(run.start.pids)))
    codes, text = run.wait_for_end(), run.start.text
    if not set(codes) <= {0, 128 + number} or "Traceback" in text:
        raise MisbehaviorError(f"exit codes {codes} after {number.name}")
    last, saved = run.last_step(), max(run.checkpoints(), default=0)
    # Rows of an earlier start stay until the first step of this one.
    if last > saved and "compiled in" in text:
        raise MisbehaviorError(
            f"{number.name}: step {last} was reached, but step {saved} was saved"
        )
    return "saved" if "saved at step" in text else "ended before the first step"


def _stop_impatiently(run: Run) -> str:
    """Repeats a signal within milliseconds, as schedulers do: it must save all the same."""
    _steps_later(run)
    for _ in range(run.random.randint(1, 5)):
        run.start.signal(signal.SIGINT, 0)
        time.sleep(run.random.random() * 0.02)
    return _stop(run, signal.SIGINT)


def _move_the_directory(run: Run) -> str:
    """Moves the run's directory away; it must say so and end, and leave nothing in its place."""
    _steps_later(run)
    away = run.logdir.with_name("away")
    run.logdir.rename(away)
    codes, text = run.wait_for_end(), run.start.text
    left = sorted(path.name for path in run.logdir.glob("*")) if run.logdir.exists() else []
    shutil.rmtree(run.logdir, ignore_errors=True)
    away.rename(run.logdir)
    if "Traceback" in text or not set(codes) <= {0, 1}:
        raise MisbehaviorError(f"exit codes {codes} after its directory was moved away")
    if 1 in codes and "was moved or deleted" not in text:
        raise MisbehaviorError("a directory that was moved away is not named")
    # A save in the background may still create the folder that it writes to.
    if not set(left) <= {"checkpoints"}:
        raise MisbehaviorError(f"wrote {left} to a second directory")
    return "said so" if 1 in codes else "trained them all"


def _stop_with_a_full_disk(run: Run) -> str:
    _steps_later(run)
    with small_disk.full(run.disk):
        run.start.signal(signal.SIGTERM)
        codes = run.wait_for_end()
    if codes[0] not in (0, 1, 128 + signal.SIGTERM) or "Traceback" in run.start.text:
        raise MisbehaviorError(f"exit codes {codes} after SIGTERM with a full disk")
    if codes[0] == 1 and "Free some disk space" not in run.start.text:
        raise MisbehaviorError("a full disk at the end is not explained")
    return "said so" if codes[0] == 1 else "saved before"


def _pause(run: Run) -> str:
    _steps_later(run)
    process = run.random.randrange(len(run.start.pids))
    run.start.signal(signal.SIGSTOP, process)
    time.sleep(0.2 + run.random.random() * 2.0)
    run.start.signal(signal.SIGCONT, process)
    return _went_on(run)


def _exhaust(use_up: Callable[[pathlib.Path], contextlib.AbstractContextManager[None]]):
    """Returns the strike of a disk without space or without inodes."""

    def strike(run: Run) -> str:
        _steps_later(run)
        before = run.start.text.count("could not be saved")
        with use_up(run.disk):
            deadline = time.monotonic() + 10.0
            run.wait_for(
                lambda: (
                    run.start.text.count("could not be saved") > before
                    or time.monotonic() > deadline
                ),
                "a warning",
            )
            if run.start.text.count("could not be saved") == before:
                raise MisbehaviorError("trained 10 s with a full disk without a warning")
        return _went_on(run)

    return strike


def _disturb_the_meeting(run: Run) -> str:
    """Connects strangers to the port of the processes that a next start begins with."""
    _kill(run)
    run.start = run.begin(10**6)
    strangers = []
    deadline = time.monotonic() + PATIENCE
    while len(strangers) < 20 and time.monotonic() < deadline and run.start.is_running:
        try:
            stranger = socket.create_connection(("localhost", run.start.port), timeout=1.0)
        except OSError:
            # It does not listen yet, or all have met.
            if "compiled in" in run.start.text:
                break
            time.sleep(0.02)
            continue
        with contextlib.suppress(OSError):
            stranger.sendall(run.random.choice(_WORDS))
        strangers.append(stranger)
    try:
        return _went_on(run)
    finally:
        for stranger in strangers:
            stranger.close()


def _start_a_second(run: Run) -> str:
    _steps_later(run)
    second = run.begin(10**6, is_forked=True)
    while second.is_running and "Resuming" not in second.text:
        time.sleep(0.05)
    if second.is_running:
        second.signal(signal.SIGKILL)
        second.wait(10.0)
        raise MisbehaviorError("a second gshard-train trained in the same directory")
    codes = second.wait(0.0)
    if any(code != 1 for code in codes) or "Traceback" in second.text:
        raise MisbehaviorError(f"exit codes {codes} of a second gshard-train in the same directory")
    _went_on(run)
    return "refused"


def _went_on(run: Run) -> str:
    step = run.last_step()
    if not run.wait_for_step(step + 2):
        raise MisbehaviorError(f"ended with exit codes {run.wait_for_end()} instead of going on")
    return "went on"


def _has_disk(run: Run) -> bool:
    return run.disk is not None


def _is_one_of_several(run: Run) -> bool:
    return run.setup.processes > 1


def reach_the_last_step(run: Run, steps: int, seconds: float = PATIENCE) -> str:
    """Waits until the training has taken all its steps; for so many seconds at most."""
    codes = run.wait_for_end(seconds)
    if any(codes):
        raise MisbehaviorError(f"exit codes {codes} at the last step")
    saved = max(run.checkpoints(), default=0)
    if run.last_step() != steps or saved != steps:
        raise MisbehaviorError(f"--steps={steps} ended at step {run.last_step()}, saved {saved}")
    return "trained them all"


def next_end(run: Run) -> int:
    """Returns a number of steps that the next start may end with.

    The last step is evaluated, so it is one that an undisturbed run evaluates, too.
    """
    begin = max([run.last_step(), *run.checkpoints()])
    return (begin // EVALUATE_EVERY + run.random.randint(1, 2)) * EVALUATE_EVERY


# They end the training before its first step.
EARLY = (
    Fault("SIGKILL in start-up", _kill_in_start_up, 2.0),
    Fault("SIGKILL in compilation", _kill_in_compilation),
    Fault("signal in compilation", _stop_in_compilation),
)
# This one is always possible.
KILL = "SIGKILL in a step"
# They end a training that has taken a step.
ENDING = (
    Fault(KILL, _kill_in_a_step, 2.0),
    Fault("SIGKILL in a checkpoint", _kill_in_a_checkpoint, 2.0),
    Fault("SIGTERM", _ask_to_stop(signal.SIGTERM)),
    Fault("SIGINT", _ask_to_stop(signal.SIGINT)),
    Fault("SIGHUP", _ask_to_stop(signal.SIGHUP)),
    Fault("SIGINT again and again", _stop_impatiently),
    Fault("moved directory", _move_the_directory),
    Fault("SIGTERM with a full disk", _stop_with_a_full_disk, needs=_has_disk),
)
# The training goes on after them.
PASSING = (
    Fault("SIGSTOP, SIGCONT", _pause),
    Fault("full disk", _exhaust(small_disk.full), 1.0, _has_disk),
    Fault("no inodes", _exhaust(small_disk.without_inodes), 1.0, _has_disk),
    Fault("strangers at the port", _disturb_the_meeting, needs=_is_one_of_several),
    Fault("second trainer", _start_a_second),
)


def possible(run: Run, faults: tuple[Fault, ...]) -> list[Fault]:
    """Returns the faults that may strike now."""
    return [fault for fault in faults if fault.name not in run.skipped and fault.needs(run)]


def draw(run: Run, faults: tuple[Fault, ...]) -> Fault:
    """Returns one of the faults that are possible, by weight."""
    choice = possible(run, faults)
    return run.random.choices(choice, [fault.weight for fault in choice])[0]


def kill_all(run: Run) -> None:
    """Ends what is left of the newest start after a problem."""
    if run.start is not None and run.start.is_running:
        with contextlib.suppress(ProcessLookupError):
            run.start.signal(signal.SIGKILL)
        run.start.wait(30.0)
