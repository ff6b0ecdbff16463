"""Compiles training steps in FP8 for GPUs, and counts their products and what plans say."""

import collections

import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.hlo import costs
from lingvo_gshard.layers.moe.routers import Top2Router
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.compiling import compilation
from lingvo_gshard.planning.machines import cuda, topologies
from lingvo_gshard.runtime.compile_options import chosen_for
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.stacks.executions import loop, sequential

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cuda.installed() is None, reason="XLA's GPU compiler is missing"),
]

TOPOLOGY = "gpu:h100:1x8"
FP8_CALL = "__cublas$lt$matmul$f8"
ROWS, LENGTH, LAYERS = 8, 2048, 2
# Products of a layer with weights: queries, keys and values are one.
ATTENTION, FEED_FORWARD = 2, 3


def trainer_of(precision="fp8", execution=None, experts=0):
    """Returns a trainer of a small model like Llama, or one whose layers have experts."""
    task = LanguageModelTask.params().set(vocabulary_size=4096, model_dim=1024, add_positions=False)
    decoder = task.decoder.set(num_layers=LAYERS, num_heads=8, hidden_dim=2816, moe_every=0)
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    decoder.layer.self_attention.rotary_fraction = 1.0
    if experts:
        decoder.moe_every = 1
        decoder.moe.set(num_experts=experts, group_size=LENGTH, router=Top2Router.params())
    decoder.execution = execution or sequential()
    return Trainer.params().set(precision=precision).instantiate(task)


def batch_specs():
    names = ("target_inputs", "target_labels", "target_positions", "target_segments")
    return {name: tf.TensorSpec([ROWS, LENGTH], tf.int32) for name in names}


def products_of(trainer, strategy="data", mesh="data=8"):
    """Returns the compiled products by type of their factors, and the types that are gathered."""
    machine = topologies.get(TOPOLOGY)
    device = machine.compile_devices()[0]
    partitioning = Partitioning.make(mesh, strategy).on("cuda")
    program, _ = train_program(trainer, partitioning, "gspmd", batch_specs())
    options = chosen_for(device, precision=trainer.p.precision)
    module = compilation.compile_for(program, machine, options=options).module
    found, gathered = collections.Counter(), collections.Counter()
    for computation in module.computations:
        for each in computation.instructions:
            if each.proto.custom_call_target == FP8_CALL:
                types = [operand.shape.dtype for operand in each.operands[:2]]
                assert costs.product_dtype(each).startswith("f8")
                found["backward" if "f8e5m2" in types else "forward"] += 1
            elif costs.is_matmul(each):
                found["others"] += 1
            elif each.opcode.startswith("all-gather"):
                gathered.update(operand.shape.dtype for operand in each.operands)
    return found, gathered


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_projections_and_feed_forward_layers_are_fp8_calls(strategy):
    found, _ = products_of(trainer_of(), strategy)
    weights = LAYERS * (ATTENTION + FEED_FORWARD)
    assert (found["forward"], found["backward"]) == (weights, 2 * weights)


def test_a_loop_over_layers_has_the_products_of_one_layer():
    found, _ = products_of(trainer_of(execution=loop("full")))
    weights = ATTENTION + FEED_FORWARD
    # The backward pass computes the forward pass again, all but the last product.
    assert found["forward"] in (2 * weights, 2 * weights - 1)
    assert found["backward"] == 2 * weights


def test_bfloat16_has_no_fp8_calls():
    found, _ = products_of(trainer_of("bfloat16"))
    assert not found["forward"] and not found["backward"] and found["others"]


def plan(precision, topology=TOPOLOGY):
    partitioning = Partitioning.make("data=8", "data")
    machine = topologies.get(topology)
    return planner.plan_step(
        trainer_of(precision), batch_specs(), partitioning, machine, "small", "gspmd"
    )


def test_plans_in_fp8_are_faster():
    narrow, wide = plan("fp8"), plan("bfloat16")
    assert narrow.seconds_per_step < wide.seconds_per_step
    assert narrow.seconds_per_step_bound < wide.seconds_per_step_bound
    assert any("xla_gpu_enable_triton_gemm=False" in note for note in narrow.notes)


def test_a_plan_for_a_gpu_without_fp8_is_refused():
    with pytest.raises(UserError, match="Set step.precision = 'bfloat16'"):
        plan("fp8", "gpu:a100:1x8")
