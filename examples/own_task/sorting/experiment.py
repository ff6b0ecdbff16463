"""The sizes of the task, as an experiment."""

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from sorting.input import SortingInput
from sorting.task import SortingTask


@registry.register("sorting.experiment.small")
def small():
    """Sorts 16 digits: two layers with 8 experts, 300 steps, a minute on 2 CPU cores."""
    task = SortingTask.params()
    task.encoder.set(num_layers=2, num_heads=4, hidden_dim=128, moe_every=2)
    task.encoder.moe.set(num_experts=8, group_size=64)
    schedule = Linear.params().set(learning_rate=3e-3, warmup_steps=30)
    step = Trainer.params().set(optimizer=Adam.params(), schedule=schedule)
    run = RunOptions.params().set(steps=300)
    return Experiment.params().set(task=task, input=SortingInput.params(), step=step, run=run)
