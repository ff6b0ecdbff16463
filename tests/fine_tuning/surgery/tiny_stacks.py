"""Makes two-layer translation models, dense or with experts, and batches for them."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer

ROWS, LENGTH, VOCABULARY, EXPERTS = 2, 8, 16, 4
_SEGMENTS = np.array([1] * 4 + [2] * 3 + [0], np.int32)
_POSITIONS = np.array([*range(4), *range(3), 0], np.int32)


def task(moe=None, **stack):
    """Returns the Params of a task; moe: of its second layers. stack: of both stacks."""
    params = TranslationTask.params().set(
        source_vocabulary_size=VOCABULARY, target_vocabulary_size=VOCABULARY, model_dim=8
    )
    for each in (params.encoder, params.decoder):
        each.set(num_layers=2, num_heads=2, hidden_dim=12, **stack)
        if moe is not None:
            each.moe = moe.copy()
    return params


def dense(**feed_forward):
    """Returns the Params of a task whose second layers have a feed-forward layer of their own."""
    return task(FeedForward.params().set(hidden_dim=20, **feed_forward))


def sparse(**moe):
    """Returns the Params of a task with experts that drop nothing in evaluation."""
    params = task()
    for stack in (params.encoder, params.decoder):
        stack.moe.set(num_experts=EXPERTS, group_size=LENGTH, **moe)
        stack.moe.router.evaluation_capacity_factor = float(EXPERTS)
    return params


def trainer(params):
    """Returns a trainer of a task's Params."""
    schedule = Linear.params().set(learning_rate=0.01, total_steps=40)
    found = Trainer.params().set(optimizer=Adam.params(), schedule=schedule)
    return found.instantiate(params.instantiate())


def arrays(trainer, seed=3):
    """Returns random weights and moments by their paths, as a checkpoint has them."""
    rng = np.random.default_rng(seed)
    specs = trainer.state_specs()

    def drawn(tree):
        return {
            path: rng.normal(size=spec.shape).astype(np.float32)
            for path, spec in tree.flatten_items()
        }

    return drawn(specs.theta), drawn(specs.moments)


def batch(index=0):
    """Returns the batch of an index."""
    rng = np.random.default_rng(index)
    made = {}
    for side in ("source", "target"):
        made[f"{side}_segments"] = np.tile(_SEGMENTS, (ROWS, 1))
        made[f"{side}_positions"] = np.tile(_POSITIONS, (ROWS, 1))
    for name in ("source_ids", "target_inputs", "target_labels"):
        ids = rng.integers(3, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
        made[name] = np.where(_SEGMENTS > 0, ids, 0).astype(np.int32)
    return made


def logits(trainer, theta, index=0):
    """Returns the logits of a batch's real target positions in evaluation."""
    with context.scope(training=False):
        tensors = theta.transform(tf.convert_to_tensor)
        found = trainer.task.logits(tensors, batch(index)).numpy()
    return found[:, _SEGMENTS > 0]
