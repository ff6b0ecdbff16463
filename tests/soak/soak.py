"""The soak: faults until there are enough of them, an undisturbed run, and the comparison."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable

from tests.soak import comparison, damage, experiment, faults, small_disk
from tests.soak.comparison import Tolerance
from tests.soak.fault_records import Records
from tests.soak.run import MisbehaviorError, Run
from tests.soak.setups import MESHES, ONE_DEVICE

# Seconds that the undisturbed run may take.
_WHOLE_RUN_PATIENCE = 3600.0
# A number of steps that no start reaches.
_ENDLESS = 1_000_000
# How often files are damaged before a start, a start is killed before its first step, it gets a
# number of steps that it reaches, and one more fault strikes that it survives.
_DAMAGE_SHARE, _EARLY_SHARE, _FINISH_SHARE, _PASSING_SHARE = 0.4, 0.2, 0.06, 0.5

_KINDS = (faults.EARLY, faults.PASSING, faults.ENDING, damage.DAMAGE)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a soak does.

    Attributes:
      seed: of everything that is left to chance.
      faults: number of faults.
      minutes: no further start begins after this time.
      meshes: whether mesh, strategy and number of processes change between starts.
      skip: names of faults to leave out.
    """

    seed: int = 0
    faults: int = 200
    minutes: float = 60.0
    meshes: bool = False
    skip: tuple[str, ...] = ()

    def __post_init__(self):
        known = [fault.name for kinds in _KINDS for fault in kinds]
        for name in self.skip:
            if name not in known:
                raise ValueError(f"--skip={name!r}: one of {', '.join(known)} expected")
        if faults.KILL in self.skip:
            raise ValueError(f"--skip={faults.KILL!r}: this fault is always needed")


@dataclasses.dataclass
class Outcome:
    """What a soak found.

    Attributes:
      records: the faults.
      steps: steps of the finished run.
      comparison: the finished run against the undisturbed one.
      has_disk: whether a disk could be filled.
    """

    records: Records
    steps: int
    comparison: comparison.Comparison
    has_disk: bool

    @property
    def is_good(self) -> bool:
        """Whether all faults ended as they must and the runs are equal."""
        return not self.comparison.differences and not self.records.problems


def soak(plan: Plan, folder: pathlib.Path, say: Callable[[str], None]) -> Outcome:
    """Trains under faults, trains undisturbed, and compares.

    Args:
      plan: what to do.
      folder: an empty directory for both runs.
      say: shows a line of progress.

    Raises:
      MisbehaviorError: the training cannot be finished.
    """
    flags = experiment.write(folder / "data")
    run = Run(folder, flags, plan.seed, MESHES if plan.meshes else ONE_DEVICE)
    run.skipped = frozenset(plan.skip)
    with small_disk.mounted(folder / "disk") as has_disk:
        if has_disk:
            run.disk = folder / "disk"
        else:
            say("No small disk can be mounted here, so none is filled.")
        records = Records(plan.faults, plan.minutes, say)
        try:
            while records.go_on:
                _start_and_strike(run, records)
            steps = _finish(run)
        finally:
            faults.kill_all(run)
        disturbed = folder / "disturbed"
        shutil.copytree(run.logdir, disturbed)
    say(f"Training {steps:,} steps undisturbed")
    flags = [*flags, "--gin_param=run.checkpoint_every_steps = 0"]
    undisturbed = Run(folder / "undisturbed", flags, plan.seed, ONE_DEVICE)
    undisturbed.start = undisturbed.begin(steps)
    faults.reach_the_last_step(undisturbed, steps, _WHOLE_RUN_PATIENCE)
    tolerance = Tolerance.across_meshes() if plan.meshes else Tolerance()
    compared = comparison.compare(disturbed, undisturbed.logdir, steps, tolerance)
    return Outcome(records, steps, compared, has_disk)


def _start_and_strike(run: Run, records: Records) -> None:
    """Changes the setup, damages files, starts the training, and strikes until it ends."""
    _change_setup(run, records)
    chance = run.random.random
    if faults.possible(run, damage.DAMAGE) and chance() < _DAMAGE_SHARE:
        _strike(run, damage.DAMAGE, records)
    allowed = run.may_resume_from()
    is_early = bool(faults.possible(run, faults.EARLY)) and chance() < _EARLY_SHARE
    is_last = not is_early and chance() < _FINISH_SHARE
    steps = faults.next_end(run) if is_last else _ENDLESS
    run.start = run.begin(steps, is_forked=not is_early or chance() < 0.5)
    try:
        if is_early:
            _strike(run, faults.EARLY, records)
            return
        if not run.wait_for(lambda: run.has_trained(allowed), "the first step"):
            raise MisbehaviorError(
                f"ended with exit codes {run.wait_for_end()} before its first step"
            )
        records.add_lost(max(allowed) - run.note_resumption(allowed))
        if is_last:
            records.add(run, "last step reached", faults.reach_the_last_step(run, steps))
            return
        while faults.possible(run, faults.PASSING) and chance() < _PASSING_SHARE:
            _strike(run, faults.PASSING, records)
        _strike(run, faults.ENDING, records)
    except MisbehaviorError as problem:
        records.add_problem(run, str(problem))
        faults.kill_all(run)
        run.repair()


def _strike(run: Run, kinds: tuple[faults.Fault, ...], records: Records) -> None:
    fault = faults.draw(run, kinds)
    records.begin(fault.name)
    records.add(run, fault.name, fault.strike(run))


def _change_setup(run: Run, records: Records) -> None:
    """Draws the setup of the next start; a change counts as a fault."""
    setup = run.draw_setup()
    if setup == run.setup:
        return
    kind = "other number of processes" if setup.processes != run.setup.processes else "other mesh"
    run.setup = setup
    records.add(run, kind, f"to {setup}")


def _finish(run: Run) -> int:
    """Trains some last steps without faults, and returns the number of all steps."""
    steps = faults.next_end(run)
    allowed = run.may_resume_from()
    run.start = run.begin(steps)
    faults.reach_the_last_step(run, steps)
    run.note_resumption(allowed)
    return steps
