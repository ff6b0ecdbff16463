"""A tiny experiment with two rows of spikes in its input, and the same without what is skipped."""

from lingvo_gshard.core.config import registry
from lingvo_gshard.wings.optimizers.spikes import Spikes
from tests import tiny

# Batches, counted from 1, whose inputs are a hundred times larger.
SPIKED = (14, 15, 30, 31)
# The batches that roll backs with `spikes()` skip.
SKIPPED = (*range(11, 16), *range(27, 32))


def spikes(**values):
    rule = Spikes.params().set(policy="roll_back", warmup_steps=4, window=6, most_in_a_row=2)
    return rule.set(roll_back_steps=3, skipped_batches=5, **values)


class SpikedBatches(tiny.TinyBatches):
    def __next__(self):
        batch = super().__next__()
        return {**batch, "x": batch["x"] * 100} if self._index in SPIKED else batch


class SpikedInput(tiny.TinyInput):
    def train_batches(self, seed):
        return SpikedBatches(self.p, seed)


class BatchesWithout(tiny.TinyBatches):
    def __next__(self):
        while self._index + 1 in SKIPPED:
            self._index += 1
        return super().__next__()


class InputWithout(tiny.TinyInput):
    def train_batches(self, seed):
        return BatchesWithout(self.p, seed)


def experiment(input_, steps=30):
    params = tiny.experiment_params(steps)
    params.step.spikes = spikes()
    params.input = input_.params()
    return params


@registry.register("tests.services.spiked.spiked")
def spiked():
    """Two rows of spikes."""
    return experiment(SpikedInput)


@registry.register("tests.services.spiked.without")
def without():
    """The batches that the run of `spiked` keeps."""
    return experiment(InputWithout)
