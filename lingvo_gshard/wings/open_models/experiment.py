"""The experiment that a `config.json` stands for."""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, UserError
from lingvo_gshard.training import Adam, Linear, RunOptions, Trainer
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family_of
from lingvo_gshard.wings.open_models.families.family import USUAL_LENGTH


def experiment_of(config: PublishedConfig, length: int = 0, precision: str = "float32") -> Params:
    """Returns the experiment of a published model, to generate, to plan and to train on.

    The experiment is set up for careful fine-tuning: Adam with a small learning rate.

    Args:
      config: the values of the model's `config.json`.
      length: positions of a row in training, and of a generated text; 0 for what the model was
        made for, and 1,024 at most.
      precision: the value of `step.precision`.

    Raises:
      UserError: the architecture or an option of it is unknown, or the length is too large.
    """
    family = family_of(config)
    task = family.task_of(config)
    positions, may_exceed = family.positions_of(config)
    if length > positions and not may_exceed:
        raise UserError(
            f"`length={length}` is more than the {positions:,} positions that the model was made "
            f"for: see {family.limit} in {config.where}"
        )
    step = Trainer.params().set(
        optimizer=Adam.params().set(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0),
        schedule=Linear.params().set(learning_rate=1e-5, warmup_steps=50),
        clip_norm=1.0,
        precision=precision,
    )
    run = RunOptions.params().set(steps=1000)
    length = length or min(positions, USUAL_LENGTH)
    if "most_source" in task:
        task.most_source = length
    name = f"open_models.{family.model_type}"
    return Experiment.params().set(
        name=name, task=task, input=family.input_of(length), step=step, run=run
    )
