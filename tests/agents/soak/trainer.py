"""Runs gshard-train for the soak, and prints the time of each step.

python -m tests.agents.soak.trainer --logdir=... --mesh=data=4 ...
"""

import sys
import time

from lingvo_gshard.core import processes
from lingvo_gshard.tools.console import entry
from lingvo_gshard.training import OBSERVERS, MetricsRow, ObservedRun, StepObserver


@OBSERVERS.register("soak")
class StepTimes(StepObserver):
    """Prints each step and its time, by a clock that no fault sets."""

    def __init__(self, run: ObservedRun):
        del run

    def after_step(self, step: int, row: MetricsRow) -> None:
        if processes.is_main():
            print(f"step {step} at {time.monotonic():.3f}", flush=True)


if __name__ == "__main__":
    sys.argv.insert(1, "train")
    entry.run_module()
