"""Trains under random faults and compares the result with an undisturbed run.

    python -m tests.soak --seed=0 --faults=200 --minutes=60
    python -m tests.soak --meshes --faults=50

`make soak` runs the first. A cut of translation.quickstart trains while its processes are killed,
stopped and paused at random moments, its disk is filled, its files are damaged and a second trainer
is started in its directory. With --meshes the mesh, the strategy and the number of processes change
between starts, too.

Exit code: 0 only if every fault ended as it must, and weights, optimizer moments and metrics equal
those of the undisturbed run: to the bit on one device, to 1e-6 across meshes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import rich.console

from tests.soak import small_disk
from tests.soak.run import MisbehaviorError
from tests.soak.soak import Outcome, Plan, soak

# The trained programs are tiny, so most of their time is compilation. These flags shorten it.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.soak", None, __doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    plan = Plan()
    parser.add_argument("--seed", type=int, default=plan.seed, help="seed of the faults")
    parser.add_argument("--faults", type=int, default=plan.faults, help="end after so many faults")
    parser.add_argument(
        "--minutes", type=float, default=plan.minutes, help="begin no fault after these minutes"
    )
    parser.add_argument(
        "--meshes", action="store_true", help="change mesh and processes between starts"
    )
    parser.add_argument(
        "--skip",
        metavar="FAULT",
        action="append",
        default=[],
        help="leave this fault out; may be repeated",
    )
    parser.add_argument(
        "--keep", metavar="DIRECTORY", help="keep the runs and what they print in this directory"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the faults as JSON; - or no value: to standard output",
    )
    return parser.parse_args()


def main() -> int:
    """Runs the soak and returns its exit code."""
    values = _arguments()
    small_disk.enter_own_namespace()
    os.environ.update(_ENVIRONMENT)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Started by nohup. What the training inherits must not ignore the signal.
        signal.signal(signal.SIGHUP, lambda *_: None)
    console = rich.console.Console(stderr=values.json == "-", highlight=False, soft_wrap=True)
    try:
        plan = Plan(values.seed, values.faults, values.minutes, values.meshes, tuple(values.skip))
    except ValueError as error:
        print(f"soak: error: {error}", file=sys.stderr)
        return 1
    folder = pathlib.Path(values.keep or tempfile.mkdtemp(prefix="soak-")).absolute()
    if folder.exists() and any(folder.iterdir()):
        print(f"soak: error: --keep={folder} is not empty", file=sys.stderr)
        return 1
    try:
        outcome = soak(plan, folder, lambda text: console.print(text, markup=False))
    except MisbehaviorError as problem:
        print(f"soak: error: the training could not be finished: {problem}; see {folder}")
        return 1
    _show(console, outcome)
    if values.json:
        _write_json(values.json, plan, outcome)
    if outcome.is_good and not values.keep:
        shutil.rmtree(folder)
    else:
        console.print(f"The runs and what they printed are in {folder}", markup=False)
    return 0 if outcome.is_good else 1


def _show(console: rich.console.Console, outcome: Outcome) -> None:
    records, compared = outcome.records, outcome.comparison
    console.print(records.table())
    console.print(
        f"{len(records.rows)} faults, {records.faults_per_hour:.0f} an hour; {outcome.steps:,} "
        f"steps. Compared with an undisturbed run: {compared.arrays} arrays of weights and "
        f"moments, largest difference {compared.largest:.3g}; {compared.rows:,} rows of "
        f"metrics.jsonl, {compared.evaluations:,} of them with an evaluation."
    )
    for text in [*records.problems, *compared.differences[:20]]:
        console.print(f"WRONG: {text}", markup=False)
    console.print("The runs are equal." if not compared.differences else "The runs differ.")


def _write_json(path: str, plan: Plan, outcome: Outcome) -> None:
    record = {
        "plan": dataclasses.asdict(plan),
        "is_good": outcome.is_good,
        "steps": outcome.steps,
        "faults_per_hour": outcome.records.faults_per_hour,
        "fills_disk": outcome.has_disk,
        "problems": outcome.records.problems,
        "comparison": dataclasses.asdict(outcome.comparison),
        "faults": [dataclasses.asdict(row) for row in outcome.records.rows],
    }
    text = json.dumps(record, indent=1) + "\n"
    if path == "-":
        print(text, end="")
    else:
        pathlib.Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
