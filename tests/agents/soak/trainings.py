"""The trainings of the soak: gshard-train with a tiny model, or a stand-in with quick steps."""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from tests.agents.soak import worker
from tests.cluster import cluster_run
from tests.tools import tiny_translation

_STEPS = 10**6
_SETTINGS = {
    "input__batch_rows": 8,
    "input__source_length": 32,
    "input__target_length": 32,
    "task__encoder__moe__group_size": 32,
    "task__decoder__moe__group_size": 32,
    # The run without faults has fewer steps, and the same rates.
    "step__schedule__total_steps": _STEPS,
    "run__routers__every_steps": 0,
    "run__checkpoint_every_steps": 200,
    "run__snapshot_every_steps": 20,
    "run__keep_programs": True,
}

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Training:
    """What the hosts of a soak train.

    Attributes:
      command: of a worker, without its mesh.
      options: of the agents.
      snapshot_every: steps between two snapshots.
      checkpoint_every: steps between two checkpoints.
      expected: returns the state after so many steps without a fault.
    """

    command: list[str]
    options: list[str]
    snapshot_every: int
    checkpoint_every: int
    expected: Callable[[int], Arrays]


def real(folder: pathlib.Path, hosts: int) -> Training:
    """Returns a training of a tiny model by gshard-train.

    It always has the mesh of all hosts, so that its state is that of a run without faults.
    """
    flags = tiny_translation.write(folder, **_SETTINGS)
    flags += ["--strategy=expert", f"--compilation_cache={folder}/cache"]
    command = [sys.executable, "-m", "tests.agents.soak.trainer", *flags]

    def expected(steps: int) -> Arrays:
        calm = folder / "calm"
        launch = [sys.executable, "-m", "lingvo_gshard", "launch", "local", "--nospare"]
        launch += [f"--hosts={hosts}"]
        mine = [f"--logdir={calm}", f"--steps={steps}", f"--mesh=data={hosts}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        with (folder / "calm.log").open("w") as log:
            subprocess.run(
                [*launch, "--", *command, *mine],
                env=environment,
                stdout=log,
                stderr=log,
                check=True,
            )
        checkpoint = newest(calm)
        assert checkpoint.step == steps
        return arrays(checkpoint)

    return Training(
        [*command, f"--logdir={folder}/run", f"--steps={_STEPS}"],
        [f"--min_hosts={hosts}", "--lost_seconds=20"],
        int(_SETTINGS["run__snapshot_every_steps"]),
        int(_SETTINGS["run__checkpoint_every_steps"]),
        expected,
    )


def stand_in(folder: pathlib.Path, hosts: int) -> Training:
    """Returns a training of a toy state, whose sums are exact and equal on any mesh."""
    del hosts

    def expected(steps: int) -> Arrays:
        state, step = cluster_run.first_state(), cluster_run.make_step()
        w, row = state.theta.w, state.moments.w.row
        for _ in range(steps):
            w, row, mean = step(w, row)
            # Steps that are started ahead wait for one another forever on a busy machine.
            mean.block_until_ready()
        scale = np.asarray(state.theta.scale)
        return {"theta.w": np.asarray(w), "theta.scale": scale, "moments.w.row": np.asarray(row)}

    return Training(
        [sys.executable, "-m", worker.__name__, str(folder / "run"), str(_STEPS)],
        ["--min_hosts=2", "--other_mesh=data=3", "--lost_seconds=10"],
        worker.SNAPSHOT_EVERY,
        worker.CHECKPOINT_EVERY,
        expected,
    )


TRAININGS: dict[str, Callable[[pathlib.Path, int], Training]] = {"real": real, "stand_in": stand_in}


def newest(logdir: pathlib.Path) -> Checkpoint:
    """Returns the newest checkpoint of a run."""
    checkpoint = CheckpointStore(logdir / "checkpoints", writable=False).restore()
    assert checkpoint is not None
    return checkpoint


def arrays(checkpoint: Checkpoint) -> Arrays:
    """Returns all arrays of a checkpoint by part and path."""
    return {
        f"{part}.{path}": np.asarray(array)
        for part, found in checkpoint.arrays.items()
        for path, array in found.items()
    }


def is_equal(found: Arrays, wanted: Arrays) -> bool:
    """Returns whether arrays are equal to the bit."""
    return found.keys() == wanted.keys() and all(
        found[path].dtype == wanted[path].dtype and found[path].tobytes() == wanted[path].tobytes()
        for path in wanted
    )
