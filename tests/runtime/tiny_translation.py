"""A translation model small enough to train on eight devices in seconds."""

from collections.abc import Mapping

import numpy as np

from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer

ROWS, LENGTH = 8, 12
# Two packed sentences and padding.
_SEGMENTS = np.array([1] * 6 + [2] * 4 + [0] * 2, np.int32)
_POSITIONS = np.array([*range(6), *range(4), 0, 0], np.int32)


def trainer(
    num_experts: int = 8,
    vocabulary_size: int = 32,
    group_size: int = LENGTH,
    stack_values: Mapping[str, object] | None = None,
    **trainer_values: object,
) -> Trainer:
    """Returns a trainer of two layers on each side, the second of experts, in float32.

    stack_values: of the encoder and of the decoder, by their paths in these.

    Its optimizer's moments are factored, and weights move by about a hundredth in each step.
    """
    task = TranslationTask.params().set(
        source_vocabulary_size=vocabulary_size,
        target_vocabulary_size=vocabulary_size,
        model_dim=16,
    )
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=2, num_heads=8, hidden_dim=32, residual_dropout_rate=0.1)
        stack.moe.set(num_experts=num_experts, group_size=group_size)
        for path, value in (stack_values or {}).items():
            stack.set_path(path, value)
    params = Trainer.params().set(
        clip_norm=1.0,
        optimizer=Adafactor.params().set(min_factored_size=8),
        schedule=Linear.params().set(learning_rate=0.01, warmup_steps=2, total_steps=40),
        **trainer_values,
    )
    return params.instantiate(task)


def batch(index: int, vocabulary_size: int = 32) -> dict[str, np.ndarray]:
    """Returns the batch of an index."""
    rng = np.random.default_rng(index)
    arrays = {}
    for side in ("source", "target"):
        arrays[f"{side}_segments"] = np.tile(_SEGMENTS, (ROWS, 1))
        arrays[f"{side}_positions"] = np.tile(_POSITIONS, (ROWS, 1))
    for name in ("source_ids", "target_inputs", "target_labels"):
        ids = rng.integers(3, vocabulary_size, (ROWS, LENGTH)).astype(np.int32)
        arrays[name] = np.where(_SEGMENTS > 0, ids, 0).astype(np.int32)
    return arrays
