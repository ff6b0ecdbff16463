"""A tiny translation model for tests of decoding."""

import numpy as np

from lingvo_gshard.tasks.translation import TranslationTask

BOS, EOS = 1, 2
# The third row is empty.
SOURCES = np.array(
    [[5, 6, 7, 8, 2], [9, 2, 0, 0, 0], [0, 0, 0, 0, 0], [4, 11, 4, 2, 0], [12, 2, 0, 0, 0]],
    np.int32,
)


def task(vocabulary_size=13, num_layers=2, num_experts=4):
    """Returns a task whose last layers have experts, which drop nothing in evaluation."""
    params = TranslationTask.params().set(
        source_vocabulary_size=vocabulary_size,
        target_vocabulary_size=vocabulary_size,
        model_dim=8,
        tie_softmax=False,
    )
    for stack in (params.encoder, params.decoder):
        stack.set(num_layers=num_layers, num_heads=2, hidden_dim=16, moe_every=num_layers)
        stack.moe.set(num_experts=num_experts, group_size=16)
        stack.moe.router.evaluation_capacity_factor = float(num_experts)
    return params.instantiate()


def theta(task, seed, scale=3.0):
    """Returns weights large enough for outputs to differ from sentence to sentence."""
    return task.init(seed).transform(lambda weight: weight * scale)
