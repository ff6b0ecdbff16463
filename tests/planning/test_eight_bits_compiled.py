# tests: training/step/precision.py, wings/low_precision/devices.py, wings/low_precision/rounding.py
# tests: wings/hlo/costs.py
"""Compiles training steps in 8 bits for GPUs and TPUs; counts products and what plans say."""

import collections

import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.moe.routers import Top2Router
from lingvo_gshard.runtime.compile_options import Traits, chosen_for
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.hlo import costs
from lingvo_gshard.wings.low_precision.fp8 import Fp8
from lingvo_gshard.wings.planning import planner
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import compilers, cuda, topologies
from tests.layers.stacks.executions import loop, sequential

pytestmark = pytest.mark.slow
needs_libtpu = pytest.mark.skipif(compilers.installed() is None, reason="libtpu is missing")
needs_cuda = pytest.mark.skipif(cuda.installed() is None, reason="XLA's GPU compiler is missing")

H100, TPU7X, V5E = "gpu:h100:1x8", "tpu7x:2x2x1", "v5e:2x4"
FP8_CALL = "__cublas$lt$matmul$f8"
ROWS, LENGTH, LAYERS = 8, 2048, 2
# Products of a layer with weights: queries, keys and values are one.
ATTENTION, FEED_FORWARD = 2, 3
# Types of the factors: of the forward pass and of both products of the gradient.
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
FORWARD, BACKWARD = (E4M3, E4M3), (E4M3, E5M2)


def trainer_of(precision="fp8", execution=None, experts=0, model_dim=1024, delayed=False):
    """Returns a trainer of a small model like Llama, or one whose layers have experts."""
    task = LanguageModelTask.params().set(
        vocabulary_size=4096, model_dim=model_dim, add_positions=False
    )
    decoder = task.decoder.set(
        num_layers=LAYERS, num_heads=8, hidden_dim=11 * model_dim // 4, moe_every=0
    )
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    decoder.layer.self_attention.rotary_fraction = 1.0
    if experts:
        decoder.moe_every = 1
        decoder.moe.set(num_experts=experts, group_size=LENGTH, router=Top2Router.params())
    decoder.execution = execution or sequential()
    fp8 = Fp8.params().set(delayed_scales=delayed)
    return Trainer.params().set(precision=precision, fp8=fp8).instantiate(task)


def batch_specs():
    names = ("target_inputs", "target_labels", "target_positions", "target_segments")
    return {name: tf.TensorSpec([ROWS, LENGTH], tf.int32) for name in names}


def compiled(topology, trainer, strategy="data"):
    """Returns the instructions of a compiled training step on eight devices."""
    machine = topologies.get(topology)
    device = machine.compile_devices()[0]
    partitioning = Partitioning.make("data=8", strategy).on(platform_of(device))
    program, _ = train_program(trainer, partitioning, "gspmd", batch_specs())
    options = chosen_for(device, traits=Traits(trainer.p.precision))
    module = compilation.compile_for(program, machine, options=options).module
    return [each for computation in module.computations for each in computation.instructions]


def types_of_products(instructions, *layers):
    """Counts the types of the factors of products within layers, by the names of operations."""
    found = collections.Counter()
    for each in instructions:
        is_kernel = costs.is_fused_attention(each)
        if not costs.is_matmul(each) or is_kernel or "norm/" in each.op_name:
            continue
        if any(f"/{layer}/" in each.op_name for layer in layers):
            types = tuple(sorted(operand.shape.dtype for operand in each.operands[:2]))
            is_fp8 = each.proto.custom_call_target == FP8_CALL
            assert is_fp8 == (types[0] == E4M3) or each.opcode == "convolution"
            found[types] += 1
    return found


@needs_cuda
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_cublaslt_multiplies_in_fp8(strategy, delayed):
    instructions = compiled(H100, trainer_of(delayed=delayed), strategy)
    count = LAYERS * (ATTENTION + FEED_FORWARD)
    layers = ("self_attention", "feed_forward")
    assert types_of_products(instructions, *layers) == {FORWARD: count, BACKWARD: 2 * count}
    # The softmax, whose weight is the embedding, and its gradients.
    assert types_of_products(instructions, "embedding") == {("bf16", "bf16"): 3}
    if strategy == "fsdp":
        assert E4M3 in gathered(instructions)


def gathered(instructions):
    """Returns the types of the matrices that are gathered."""
    return {
        operand.shape.dtype
        for each in instructions
        if each.opcode.startswith("all-gather")
        for operand in each.operands
        if len(operand.shape.dimensions) > 1
    }


@needs_cuda
def test_a_loop_over_layers_multiplies_in_fp8_alone():
    """XLA takes an iteration out of the loop, so that products are counted by type alone."""
    instructions = compiled(H100, trainer_of(execution=loop("full")))
    found = types_of_products(instructions, "self_attention", "feed_forward")
    assert set(found) == {FORWARD, BACKWARD}


@needs_cuda
def test_experts_multiply_in_fp8_and_routers_in_float32():
    instructions = compiled(H100, trainer_of(experts=16), "expert")
    # Two products with weights of two layers, and their gradients.
    assert types_of_products(instructions, "experts") == {FORWARD: 4, BACKWARD: 8}
    assert set(types_of_products(instructions, "router")) == {("f32", "f32")}


@needs_cuda
def test_bfloat16_has_no_products_in_fp8():
    instructions = compiled(H100, trainer_of("bfloat16"))
    found = types_of_products(instructions, "self_attention", "feed_forward")
    assert set(found) == {("bf16", "bf16")}


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "precision", "expected"),
    [
        (TPU7X, "fp8", {FORWARD, BACKWARD}),
        # The products of weights' gradients stay as they are.
        (V5E, "int8", {("s8", "s8"), ("bf16", "bf16")}),
    ],
)
def test_tpus_multiply_in_their_own_type(topology, precision, expected):
    instructions = compiled(topology, trainer_of(precision))
    found = types_of_products(instructions, "self_attention", "feed_forward")
    assert set(found) == expected
    assert set(types_of_products(instructions, "embedding")) == {("bf16", "bf16")}


def plan(precision, topology=H100, delayed=False):
    """Returns the plan of a model with products so large that rounding pays."""
    partitioning = Partitioning.make("data=8", "data")
    machine = topologies.get(topology)
    return planner.plan_step(
        trainer_of(precision, model_dim=4096, delayed=delayed),
        batch_specs(),
        partitioning,
        machine,
        "small",
        "gspmd",
    )


@needs_cuda
def test_plans_in_fp8_are_faster():
    narrow, wide = plan("fp8"), plan("bfloat16")
    assert narrow.seconds_per_step < wide.seconds_per_step
    assert narrow.seconds_per_step_bound < wide.seconds_per_step_bound
    assert any("xla_gpu_enable_triton_gemm=False" in note for note in narrow.notes)
    assert plan("fp8", delayed=True).seconds_per_step < 0.97 * narrow.seconds_per_step


@needs_cuda
def test_a_plan_for_a_gpu_without_fp8_is_refused():
    with pytest.raises(UserError, match="Set step.precision = 'bfloat16'"):
        plan("fp8", "gpu:a100:1x8")
