"""Faults that end the training, or happen while it runs.

A fault's `strike` returns how it ended, in a few words. It raises MisbehaviorError if the training
did what it must not do.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable

from tests.soak import small_disk
from tests.soak.experiment import EVALUATE_EVERY
from tests.soak.run import PATIENCE, MisbehaviorError, Run

_MOST_STEPS = 40


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


def _quit_without_saving(run: Run) -> str:
    _steps_later(run)
    run.start.signal(signal.SIGINT, 0)
    time.sleep(run.random.random() * 0.02)
    run.start.signal(signal.SIGINT, 0)
    codes = run.wait_for_end()
    if codes[0] not in (0, 130) or "Traceback" in run.start.text:
        raise MisbehaviorError(f"exit codes {codes} after two times SIGINT")
    return "saved" if "saved at step" in run.start.text else "quit at once"


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


def _fill_the_disk(run: Run) -> str:
    _steps_later(run)
    before = run.start.text.count("could not be saved")
    with small_disk.full(run.disk):
        deadline = time.monotonic() + 10.0
        run.wait_for(
            lambda: (
                run.start.text.count("could not be saved") > before or time.monotonic() > deadline
            ),
            "a warning",
        )
        if run.start.text.count("could not be saved") == before:
            raise MisbehaviorError("trained 10 s with a full disk without a warning")
    return _went_on(run)


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


def _is_alone(run: Run) -> bool:
    return run.setup.processes == 1


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
    Fault("SIGINT twice", _quit_without_saving, needs=_is_alone),
    Fault("SIGTERM with a full disk", _stop_with_a_full_disk, needs=_has_disk),
)
# The training goes on after them.
PASSING = (
    Fault("SIGSTOP, SIGCONT", _pause),
    Fault("full disk", _fill_the_disk, 1.5, _has_disk),
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
