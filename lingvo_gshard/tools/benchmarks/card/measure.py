"""Measures the step that fills a card, and compares it with its plan.

Needs neither TensorFlow nor a model:

    python -m lingvo_gshard.tools.benchmarks.card.measure FOLDER

prints the JSON of `gshard-bench card FOLDER --json`.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable

import jax
import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.planning.machines import chips, topologies
from lingvo_gshard.profiling.comparison import Comparison, compare
from lingvo_gshard.profiling.profile import Profile, Rate
from lingvo_gshard.tools.benchmarks import exported
from lingvo_gshard.tools.benchmarks.card import files, gaps, traced
from lingvo_gshard.tools.benchmarks.card.files import CardFolder, CardRecord
from lingvo_gshard.tools.benchmarks.card.gaps import Gap
from lingvo_gshard.tools.benchmarks.exported_step import SavedStep

TRACE = "measured.xplane.pb"


class CardRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step that fills a card: measured, and as planned.

    Attributes:
      card: how the step was chosen.
      measured: the step time, the rate and the memory, as `gshard-bench exported` measures them.
      goal: the MFU that the step should reach.
      planned_seconds: seconds of a step by the plan.
      planned_seconds_bound: a lower bound by the plan.
      planned_peak: peak bytes by the plan.
      memory_by_plan: measured bytes by planned ones; None if jax does not count bytes here.
      seconds_by_plan: measured seconds by planned ones.
      comparison: predicted and measured seconds by kind of work and by layer.
      kind_gaps: time beyond the plan by kind of work, largest first.
      layer_gaps: the largest gaps of layers and phases.
      findings: what limits the step, in sentences.
      profile: where the time of the traced steps went. They run one at a time, on a GPU without
        CUDA graphs, so they may take longer than the measured ones.
    """

    card: CardRecord
    measured: exported.Row
    goal: float
    planned_seconds: float
    planned_seconds_bound: float
    planned_peak: int
    memory_by_plan: float | None
    seconds_by_plan: float
    comparison: Comparison
    kind_gaps: list[Gap]
    layer_gaps: list[Gap]
    findings: list[str]
    profile: Profile


def measure(
    folder: str, repeats: int, gemm_size: int | None, report: Callable[[str], None]
) -> CardRow:
    """Measures the step of a folder on the devices of this machine.

    Also writes the trace of some steps to the folder.

    Args:
      folder: what `gshard-bench fill` wrote.
      repeats: number of runs.
      gemm_size: rows and columns of the reference product; None chooses them for the device.
      report: called with each stage.

    Raises:
      UserError: names the folder or file that cannot be read, or that is for another card.
    """
    read = files.read(folder)
    _check_card(folder, read.card, jax.devices()[0])
    step = SavedStep(read.step, report, options=read.card.options)
    row = exported.measure_step(step, repeats, gemm_size, report)
    report("tracing")
    source = f"{row.gemm_dtype} products of {row.gemm_size} x {row.gemm_size}, timed here"
    rate = Rate(flops_per_second=row.gemm_rate, source=source)
    profile, trace = traced.profile(step, read.card.experiment, rate)
    (pathlib.Path(folder) / TRACE).write_bytes(trace)
    return _row(read, row, profile)


def _row(read: CardFolder, row: exported.Row, profile: Profile) -> CardRow:
    plan, found = read.plan, compare(profile, read.plan)
    kinds, goal = gaps.of_kinds(found, profile), gaps.goal(found)
    peak = plan.bytes_per_device.peak
    return CardRow(
        card=read.card,
        measured=row,
        goal=goal,
        planned_seconds=plan.seconds_per_step,
        planned_seconds_bound=plan.seconds_per_step_bound,
        planned_peak=peak,
        memory_by_plan=row.memory_in_use / peak if row.memory_in_use else None,
        seconds_by_plan=row.step_seconds / plan.seconds_per_step,
        comparison=found,
        kind_gaps=kinds,
        layer_gaps=gaps.of_layers(found),
        findings=gaps.in_words(kinds, row.mfu, goal),
        profile=profile,
    )


def _check_card(folder: str, card: CardRecord, device: Device) -> None:
    """Raises ValueError unless the device is the card that the folder is for."""
    wanted = topologies.get(card.topology).chip
    found = chips.of_device(device.platform, device.device_kind)
    key = found.key if found else device.platform
    if key == wanted.key or (found is None and device.platform == wanted.kind):
        return
    here = f"gpu:{key}:1x1" if device.platform == "gpu" else f"{key}:1"
    raise UserError(
        f"{folder} was filled for {wanted.name} ({card.topology}), but this machine has "
        f"{device.device_kind}; fill it again with --topology={here}"
    )


def main() -> None:
    """Prints the result for one folder as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="the folder that gshard-bench fill wrote")
    parser.add_argument("--repeats", type=int, default=exported.REPEATS, help="how many runs")
    parser.add_argument("--gemm_size", type=int, help="rows and columns of the product's matrices")
    given = parser.parse_args()
    row = measure(given.folder, given.repeats, given.gemm_size, lambda _: None)
    print(msgspec.json.encode({"device": exported.device(), "rows": [row]}).decode())


if __name__ == "__main__":
    main()
