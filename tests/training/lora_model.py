"""A small language model with adapters."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.wings.fine_tuning.adapters import is_factor

LENGTH, VOCABULARY = 6, 16
ALL = ("*.self_attention", "*.feed_forward", "*.experts", "softmax")


def task_params(rank: int = 3, weights: object = ALL, **stack_values: object) -> Params:
    """Returns a task of two layers, the second of experts; stack_values: of its decoder by path."""
    task = LanguageModelTask.params().set(
        vocabulary_size=VOCABULARY, model_dim=8, tie_softmax=False
    )
    task.decoder.set(num_layers=2, num_heads=2, hidden_dim=16, residual_dropout_rate=0.0)
    task.decoder.moe.set(num_experts=4, group_size=LENGTH)
    for path, value in stack_values.items():
        task.decoder.set_path(path, value)
    task.lora.set(rank=rank, alpha=2.0 * rank, weights=weights)
    return task


def batch(rows: int = 2) -> dict[str, np.ndarray]:
    """Returns a batch of random ids."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, VOCABULARY, (rows, LENGTH + 1)).astype(np.int32)
    ones = np.ones((rows, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    arrays = {"inputs": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "positions": positions}
    return {f"target_{name}": array for name, array in arrays.items()}


def random_factors(theta: NestedMap) -> NestedMap:
    """Returns weights with random factors in place of zeros."""
    rng = np.random.default_rng(1)

    def moved(path: str, weight: tf.Tensor) -> tf.Tensor:
        noise = rng.normal(size=weight.shape).astype(np.float32)
        return tf.constant(noise * 0.1) if is_factor(path) else weight

    return theta.transform_with_path(moved)
