"""A tiny experiment whose input is stuck for a minute at a batch, and one whose process sleeps."""

import time

from lingvo_gshard.core import processes
from lingvo_gshard.core.config import registry
from tests import tiny

STUCK_BATCH = 6


class StuckBatches(tiny.TinyBatches):
    def __next__(self):
        if self._index + 1 == STUCK_BATCH and processes.index() == processes.count() - 1:
            wait_for_a_disk()
        return super().__next__()


class StuckInput(tiny.TinyInput):
    def train_batches(self, seed):
        return StuckBatches(self.p, seed)


def wait_for_a_disk():
    time.sleep(60)  # stuck here


@registry.register("tests.services.stuck.experiment")
def experiment():
    """The input of the last process is stuck."""
    params = tiny.experiment_params(30)
    params.run.set(hang_factor=2.0, hang_seconds=3.0)
    params.input = StuckInput.params()
    return params


def stuck_line() -> int:
    """Returns the number of the line that is stuck."""
    with open(__file__, encoding="utf-8") as file:
        return 1 + next(n for n, line in enumerate(file) if "# stuck here" in line)
