# tests: runtime/lowering/folding.py, wings/spmd_passes/passes.py
"""Tests lowering without constant folding: literals, random numbers, and threads."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from tensorflow.python import pywrap_tfe

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.runtime.lowering.folding import without_folding
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.program.step_programs import init_program, train_program
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.functions.partition import partition
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.runtime import tiny_translation

ROWS, LENGTH, M, POSITIONS = 4, 24, 8, 32
# The table of sinusoids, which is computed in float64. Its size is the model's.
TABLE = POSITIONS * M
# Elements of a literal that may be anywhere: shapes and permutations of dimensions.
SMALL = 16


def literals(program: Program) -> list[int]:
    """Returns the number of elements of each constant whose elements differ."""
    context, sizes = mlir.make_ir_context(), []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.constant":
            values = ir.DenseElementsAttr(operation.attributes["value"])
            if not values.is_splat:
                sizes.append(len(values))
        return ir.WalkResult.ADVANCE

    with context:
        stablehlo.deserialize_portable_artifact(context, program.module).operation.walk(visit)
    return sizes


def test_counters_and_masks_are_no_literals():
    key = tf.constant([5, 9])

    def function(x_BL):
        x_BL = annotate(x_BL, "BL")
        words_BL = random_numbers.hashed_words([16, 40], key)
        is_before_LK = tf.range(40) <= tf.range(40)[:, None]
        return x_BL + tf.cast(words_BL, tf.int64), is_before_LK

    def outputs(x_BL):
        words_BL, is_before_LK = function(x_BL)
        return [("words", words_BL, None), ("is_before", is_before_LK, None)]

    inputs = [Array("x", (16, 40), "int64", None)]
    program = lower("test", outputs, inputs, Partitioning.make("data=8", "data"))
    assert max(literals(program), default=0) <= SMALL
    words_BL, is_before_LK = partition(function, "data=8", "data")(np.zeros([16, 40], np.int64))
    np.testing.assert_array_equal(words_BL, random_numbers.hashed_words([16, 40], key))
    np.testing.assert_array_equal(is_before_LK, np.tri(40, dtype=bool))


def test_shapes_that_need_folding_are_lowered_with_it():
    def function(x):
        shape = tf.tensor_scatter_nd_update(tf.ones([2], tf.int32), [[0]], [8])
        return tf.reshape(x, shape)

    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(partition(function, "one=1")(x), x[:, None])


def test_the_setting_is_restored_when_the_last_thread_leaves():
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with without_folding():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    with pytest.raises(KeyError), without_folding():
        raise KeyError
    assert pywrap_tfe.TF_GetXlaConstantFoldingDisabled()
    leave.set()
    thread.join()
    assert not pywrap_tfe.TF_GetXlaConstantFoldingDisabled()


def test_groups_are_numbered_without_a_table():
    groups = Groups(4, 12, 2, 3)
    with groups.ordered():
        pass
    numbers_G = groups._numbers()
    expected = np.arange(24).reshape(4, 3, 2).transpose(1, 0, 2).reshape(-1)
    np.testing.assert_array_equal(numbers_G, expected)
    ordered_GE = groups.in_order(tf.stack([numbers_G, -numbers_G], 1))
    np.testing.assert_array_equal(ordered_GE, np.stack([np.arange(24), -np.arange(24)], 1))


def set_stack(stack: Params, execution: Params) -> None:
    """Sets all dropouts of a stack, and random routing."""
    # A stage of a pipeline needs a layer without experts and one with them.
    num_layers = 2 * execution.stages if "stages" in execution else 2
    stack.set(num_layers=num_layers, num_heads=2, hidden_dim=16, execution=execution)
    stack.set(token_dropout_rate=0.1, input_dropout_rate=0.1)
    stack.set(residual_dropout_rate=0.1, attention_dropout_rate=0.1)
    stack.moe.set(num_experts=4, group_size=LENGTH // 2)
    stack.moe.experts.dropout_rate = 0.1
    stack.layer.self_attention.rotary_fraction = 1.0


def make_trainer(task: str, execution: Params, **values: object) -> Trainer:
    """Returns a trainer of a task with all dropouts.

    Args:
      task: "translation", "language model" or "dropless".
      execution: how its stacks run.
      **values: options of the trainer.
    """
    if task == "translation":
        sizes = {"source_vocabulary_size": 32, "target_vocabulary_size": 32}
        params = TranslationTask.params().set(model_dim=M, **sizes)
        stacks = [params.encoder, params.decoder]
    else:
        params = LanguageModelTask.params().set(model_dim=M, vocabulary_size=32)
        stacks = [params.decoder]
    params.positions.max_length = POSITIONS
    for stack in stacks:
        set_stack(stack, execution)
        if task == "dropless":
            router = TopKRouter.params().set(capacity_factor=0.0)
            stack.moe.set(dispatch=DroplessDispatch.params(), router=router)
    trainer = Trainer.params().set(
        optimizer=Adam.params(),
        **values,
    )
    return trainer.instantiate(params)


def step(trainer: Trainer, mesh: str, strategy: str, rows: int) -> Program:
    """Returns a training step of a batch with these rows."""
    names = tiny_translation.batch(0)
    if isinstance(trainer.task, LanguageModelTask):
        names = [name for name in names if name.startswith("target")]
    batch = {name: tf.TensorSpec((rows, LENGTH), tf.int32) for name in names}
    return train_program(trainer, Partitioning.make(mesh, strategy), "gspmd", batch)[0]


def check_size(programs: dict[int, Program]) -> None:
    """Asserts that programs are equally large whatever the number of devices.

    That for one device has no exchange of its own, and needs only to have no large literal.
    """
    for program in programs.values():
        large = [size for size in literals(program) if size > SMALL]
        assert set(large) <= {TABLE}
    sizes = {devices: len(p.module) for devices, p in programs.items() if devices > 1}
    # Sizes of tensors have more digits.
    assert max(sizes.values()) < 1.01 * min(sizes.values()), sizes


@pytest.mark.slow
def test_the_size_of_a_program_does_not_depend_on_the_devices():
    trainer = make_trainer("language model", sequential())
    check_size({n: step(trainer, f"data={n}", "expert", ROWS * n) for n in (8, 512)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "execution", "mesh", "strategy", "values"),
    [
        ("translation", sequential(), "data={}", "expert", {}),
        ("translation", loop("full"), "data={}", "expert", {}),
        ("translation", loop(), "data={}", "expert", {"micro_batches": 2}),
        ("translation", loop("products"), "data={},model=2", "expert_tensor", {}),
        ("language model", loop("full"), "data={},context=2", "expert_context", {}),
        ("language model", sequential("full"), "data={}", "expert_zero1", {}),
        ("language model", loop(), "data={}", "fsdp", {"precision": "bfloat16_weights"}),
        ("language model", pipeline(2, micro_batches=2), "data={},stage=2", "data_pipeline", {}),
        ("dropless", sequential(), "data={}", "expert", {}),
    ],
)
def test_no_combination_of_options_grows_with_the_devices(task, execution, mesh, strategy, values):
    trainer = make_trainer(task, execution, **values)
    counts = (1, 8, 64, 512)
    check_size({n: step(trainer, mesh.format(n), strategy, ROWS * n) for n in counts})


@pytest.mark.slow
def test_the_initial_state_is_no_literal():
    trainer = make_trainer("translation", sequential())
    partitionings = {n: Partitioning.make(f"data={n}", "expert") for n in (8, 512)}
    check_size({n: init_program(trainer, p, "gspmd") for n, p in partitionings.items()})
