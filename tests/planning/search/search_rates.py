"""Device rates and models for tests of the search: rings of links, and dense Transformers."""

import collections
import math

import tensorflow as tf

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.planning.search.costs import Cost, Rates
from tests.layers.stacks.executions import loop

# Bytes that a device sends on a ring, relative to the larger of operand and result.
_SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
_LINK = 50e9

BATCH_NAMES = (
    "source_ids",
    "source_segments",
    "source_positions",
    "target_inputs",
    "target_labels",
    "target_segments",
    "target_positions",
)


def ring_rates(capacity: int = 2**34, flops_per_second: float = 1e14) -> Rates:
    """Returns rates with 1 TB/s of memory bandwidth and a ring of 50 GB/s links for each axis."""
    speeds = dict.fromkeys(("float32", "bfloat16"), flops_per_second)
    return Rates(speeds, 1e12, capacity, _ring_seconds)


def _ring_seconds(kind: str, bytes: int, axes: tuple[str, ...], mesh: Mesh) -> float:
    size = math.prod(mesh.axis_size(axis) for axis in axes)
    return _SENT[kind] * bytes * (size - 1) / size / _LINK + 1e-6 * (size - 1)


def dense(model_dim: int, hidden_dim: int, layers: int, heads: int, dtype: str) -> Trainer:
    """Returns a trainer of a dense Transformer whose layers are loops, half in the encoder."""
    task = TranslationTask.params().set(
        source_vocabulary_size=32000,
        target_vocabulary_size=32000,
        model_dim=model_dim,
        # The cost model reads the letters of all logits, not those of chunks.
        logits_positions=2**31 - 1,
    )
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=layers // 2, num_heads=heads, hidden_dim=hidden_dim)
        stack.set(moe_every=0, execution=loop())
    return trainer(task, dtype)


def trainer(task, precision: str = "float32", micro_batches: int = 1) -> Trainer:
    """Returns a trainer with Adafactor."""
    params = Trainer.params().set(optimizer=Adafactor.params(), precision=precision)
    params.micro_batches = micro_batches
    return params.instantiate(task)


def batch(rows: int, length: int) -> dict[str, tf.TensorSpec]:
    """Returns the specs of a batch whose source and target have the same length."""
    return {name: tf.TensorSpec((rows, length), tf.int32) for name in BATCH_NAMES}


def bytes_by_kind(cost: Cost) -> dict[str, int]:
    """Returns the bytes of all calls in a step, by kind of collective."""
    total: collections.Counter[str] = collections.Counter()
    for call, _, times in cost.calls:
        total[call.kind] += call.bytes * times
    return dict(total)
