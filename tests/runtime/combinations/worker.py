"""Runs combinations in a process of its own and writes one line of JSON about each.

python -m tests.runtime.combinations.worker '<combination as JSON>' ...
python -m tests.runtime.combinations.worker --seeds=0:50
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import numpy as np  # noqa: E402

from lingvo_gshard.core.errors import UserError  # noqa: E402
from lingvo_gshard.core.nested_map import NestedMap  # noqa: E402
from lingvo_gshard.runtime.devices import devices_for  # noqa: E402
from lingvo_gshard.runtime.program.executable import Executable  # noqa: E402
from lingvo_gshard.runtime.program.program import Program  # noqa: E402
from lingvo_gshard.runtime.program.step_programs import (  # noqa: E402
    eval_program,
    state_arrays,
    train_program,
)
from lingvo_gshard.runtime.step_compiler import batch_specs  # noqa: E402
from lingvo_gshard.sharding.mesh import Mesh  # noqa: E402
from lingvo_gshard.sharding.partitioning import Partitioning  # noqa: E402
from lingvo_gshard.training.step.trainer import Trainer  # noqa: E402
from lingvo_gshard.wings.verification.experiment import noisy_state  # noqa: E402
from lingvo_gshard.wings.verification.findings import compare, compare_update  # noqa: E402
from lingvo_gshard.wings.verification.steps import in_float64, run_on_arrays  # noqa: E402
from tests.runtime.combinations.combination import Combination  # noqa: E402

# Largest relative difference in float64, and that of the following metrics in narrower types.
EXACT, NARROW = 1e-7, 0.1
# Others count tokens, which rounding sends to other experts or gives other predictions.
SMOOTH = ("loss", "gradient_norm", "evaluated loss")


def verdict(combination: Combination) -> tuple[str, str]:
    """Returns "equal", "refused", "differs" or "error", and the reason."""
    try:
        found = _differences(combination)
    except Exception as error:
        kind = "refused" if _is_refusal(error) else "error"
        return kind, f"{error}" if kind == "refused" else traceback.format_exc()
    return ("differs", "; ".join(found)) if found else ("equal", "")


def _is_refusal(error: Exception) -> bool:
    """Returns whether the error tells the user in one sentence what is not possible."""
    return isinstance(error, UserError) and "\n" not in str(error)


def _differences(combination: Combination) -> list[str]:
    """Returns what one training step, and an evaluation, compute differently on a mesh."""
    partitioning = Partitioning.make(Mesh.parse(combination.mesh), combination.strategy)
    trainer = combination.trainer()
    state = noisy_state(trainer, seed=0, step=0)
    one = Mesh(tuple((name, 1) for name in partitioning.mesh.names))
    alone = Partitioning.make(one, combination.strategy)
    mine, whole = (_results(combination, trainer, each, state) for each in (partitioning, alone))
    before = dict(zip(mine, state.flatten(), strict=False))
    found = {}
    for name, value in mine.items():
        if not combination.is_exact and name not in SMOOTH:
            continue
        if name.removesuffix(" weight").endswith("/over_bound_share"):
            # One device has room for all rows.
            continue
        if combination.optimizer == "lion" and name.startswith(("theta.", "averages.")):
            # It steps by signs, which rounding flips where a gradient is zero. Its moments tell.
            continue
        if name in before:
            difference = compare_update(value, whole[name], before[name], partitioning.mesh)
        else:
            difference = compare(np.asarray(value), np.asarray(whole[name]), partitioning.mesh)
        found[name] = difference.relative
    tolerance = EXACT if combination.is_exact else NARROW
    return [f"{name} by {value:.1e}" for name, value in found.items() if not value <= tolerance]


def _results(
    combination: Combination, trainer: Trainer, partitioning: Partitioning, state: NestedMap
) -> dict[str, Any]:
    """Returns the new state by path, then the metrics, of a step and of an evaluation."""
    batch = combination.batch()
    specs = batch_specs(batch)
    program, names = train_program(trainer, partitioning, "gspmd", specs)
    values = [*state.flatten(), *(batch[name] for name in sorted(batch))]
    *arrays, metrics = _run(program, partitioning, values, combination.is_exact)
    results = dict(zip((a.path for a in program.outputs), arrays, strict=False))
    results |= zip(names, np.asarray(metrics), strict=True)
    if combination.evaluates:
        program, names = eval_program(trainer, partitioning, "gspmd", specs)
        by_path = dict(
            zip((a.path for a in state_arrays(trainer, partitioning)), values, strict=False)
        )
        values = [
            by_path.get(a.path, batch.get(a.path.removeprefix("batch."))) for a in program.inputs
        ]
        (metrics,) = _run(program, partitioning, values, combination.is_exact)
        results |= zip((f"evaluated {name}" for name in names), np.asarray(metrics), strict=True)
    return results


def _run(program: Program, partitioning: Partitioning, values: list, is_exact: bool) -> list:
    """Runs a program, in float64 where it computes in float32 if the result is to be exact."""
    devices = devices_for(partitioning.mesh.size)
    executable = Executable(in_float64(program) if is_exact else program, devices)
    return list(run_on_arrays(executable, values, devices))


def _combinations(arguments: list[str]) -> Iterator[Combination]:
    """Yields the combinations of a command line."""
    for text in arguments:
        if text.startswith("--seeds="):
            begin, end = map(int, text.removeprefix("--seeds=").split(":"))
            yield from map(Combination.draw, range(begin, end))
        else:
            yield Combination(**json.loads(text))


def main() -> None:
    """Writes the verdict on each combination of the command line."""
    # Collections would visit the objects of TensorFlow's import, which never die, again and again.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    for combination in _combinations(sys.argv[1:]):
        kind, reason = verdict(combination)
        line = {"verdict": kind, "reason": reason, "combination": dataclasses.asdict(combination)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
