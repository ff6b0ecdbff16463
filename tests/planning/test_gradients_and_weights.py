# tests: training/step/gradients.py, sharding/partitioning.py
"""Counts what training steps reduce and gather: gradients once, weights in 16 bits."""

import functools

import pytest
import tensorflow as tf

from lingvo_gshard.runtime.program import step_programs
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.hlo.operations import CollectiveCall
from lingvo_gshard.wings.planning.machines import cuda, topologies
from tests.layers.stacks.executions import loop

pytest.importorskip("libtpu")

B, L, M, H, V, LAYERS = 32, 128, 256, 1024, 512, 2
MATRICES = LAYERS * (4 * M * M + 2 * M * H)
TABLES = V * M
on_gpus = pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
# Biases and norms, less than this share of the bytes.
REST = 1.02


@functools.cache
def calls(
    strategy: str, micro_batches: int, machine: str = "v5p:2x2x2", **changes: str
) -> list[CollectiveCall]:
    """Returns the collectives of a bfloat16 step on eight devices."""
    task = LanguageModelTask.params().set(vocabulary_size=V, model_dim=M)
    task.decoder.set(num_layers=LAYERS, num_heads=2, hidden_dim=H, moe_every=0)
    task.decoder.execution = loop("full")
    params = Trainer.params().set(
        optimizer=Adam.params(), precision="bfloat16", micro_batches=micro_batches, **changes
    )
    names = ("inputs", "labels", "positions", "segments")
    batch = {f"target_{name}": tf.TensorSpec((B, L), tf.int32) for name in names}
    partitioning = Partitioning.make("data=8", strategy)
    trainer = params.instantiate(task)
    program, _ = step_programs.train_program(trainer, partitioning, "gspmd", batch)
    return Executable(program, topologies.get(machine).compile_devices()).collectives()


def total(found: list[CollectiveCall], *kinds: str, dtype: str = "") -> float:
    """Returns the bytes of collectives of these kinds, of one dtype or of all."""
    chosen = [call for call in found if call.kind in kinds and dtype in ("", call.dtype)]
    return sum(call.bytes * call.times for call in chosen)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_gradients_of_whole_weights_are_reduced_once(micro_batches):
    found = calls("data", micro_batches)
    once = 4 * (MATRICES + TABLES)
    assert once <= total(found, "all-reduce", "reduce-scatter") <= REST * once


def test_sums_over_micro_batches_are_reduced_in_16_bits_where_asked():
    found = calls("data", 4, reduce_dtype="bfloat16")
    once = 2 * (MATRICES + TABLES)
    assert once <= total(found, "all-reduce", "reduce-scatter") <= REST * once


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_zero1_gathers_each_weight_once_in_16_bits(micro_batches):
    found = calls("zero1", micro_batches)
    assert total(found, "all-gather", dtype="float32") <= (REST - 1) * 4 * MATRICES
    # Gathering one layer ahead, the last iteration of a loop gathers its own layer once more.
    layers = LAYERS + (micro_batches == 1)
    once = 2 * (MATRICES * layers // LAYERS + TABLES)
    assert once <= total(found, "all-gather", dtype="bfloat16") <= REST * once


@pytest.mark.parametrize("machine", ["v5p:2x2x2", pytest.param("gpu:h100:1x8", marks=on_gpus)])
def test_fsdp_gathers_weights_in_16_bits(machine):
    found = calls("fsdp", 1, machine)
    assert total(found, "all-gather", dtype="float32") <= (REST - 1) * 4 * MATRICES
