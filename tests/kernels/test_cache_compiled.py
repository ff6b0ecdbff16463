# tests: wings/kernels/cache_attention.py, wings/kernels/cache_tpu.py, wings/kernels/cache_triton.py
"""Compiles generation for TPUs and GPUs: the cache's kernel is there, and no second cache."""

import functools

import pytest

from lingvo_gshard.core.scopes import FusedCall
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape
from lingvo_gshard.wings.inference.programs.executables import ADMIT, STEPS, ProgramKey
from lingvo_gshard.wings.inference.programs.maker import ProgramMaker
from lingvo_gshard.wings.planning.compiling.compilation import compile_for
from lingvo_gshard.wings.planning.machines import topologies

pytestmark = pytest.mark.slow

VOCABULARY = 512
ROWS, LENGTH, PROMPT, LAYERS, HEADS, SHARED, SIZE = 16, 1024, 512, 2, 8, 4, 128
WINDOW = 100
# bfloat16 keys, or values, of one layer on each of 4 devices: rows and heads in two parts each.
ARRAY = 2 * ROWS * LENGTH * SHARED * SIZE // 4
TOPOLOGIES = {"v5e:2x2": "libtpu", "gpu:h100:1x4": "jax_cuda12_plugin"}


def task():
    """Returns a language model with a window in one of its two layers."""
    params = LanguageModelTask.params().set(vocabulary_size=VOCABULARY, model_dim=512)
    params.add_positions = False
    params.fprop_dtype = "bfloat16"
    near = SelfAttention.params().set(
        num_key_value_heads=SHARED, head_dim=SIZE, rotary_fraction=1.0, window=WINDOW
    )
    params.decoder.set(num_layers=LAYERS, num_heads=HEADS, hidden_dim=1024, moe_every=0)
    params.decoder.attention_pattern = (near, near.copy().set(window=0))
    return params.instantiate()


@functools.cache
def compiled(topology, name, rows=ROWS, mesh="data=2,model=2"):
    """Returns the compiled program of a step, or of a text that enters, and its kernels."""
    pytest.importorskip(TOPOLOGIES[topology])
    machine = topologies.get(topology)
    platform = platform_of(machine.compile_devices()[0])
    partitioning = Partitioning.make(mesh, "data_tensor")
    model = task()
    maker = ProgramMaker(
        model, model_facts(model, LENGTH, 1, (2,)), partitioning, platform=platform
    )
    given = {"texts": 2, "given": PROMPT} if name == ADMIT else {}
    program = maker.make(ProgramKey(name, SearchKind(), StateShape(rows, LENGTH), **given))
    return compile_for(program, machine), program


def kernel_calls(module, kernel):
    """Returns the calls of a kernel's Pallas code, with the share of what each computes."""
    found = []
    for computation in module.computations:
        for instruction in computation.instructions:
            call = FusedCall.of(instruction.op_name)
            if instruction.opcode == "custom-call" and call and call[0] == kernel:
                found.append((instruction, call[1]))
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_step_reads_the_cache_by_a_kernel_and_has_it_once(topology):
    found, program = compiled(topology, STEPS)
    assert {(use.kernel, use.obstacle) for use in program.kernels} == {
        ("attention over the cache", "")
    }
    calls = kernel_calls(found.module, "cache_attention")
    assert len(calls) == LAYERS
    # A window reads the blocks that it meets.
    assert sorted(share == 1.0 for _, share in calls) == [False, True]
    # The donated cache is updated in place, in the layout of the kernel.
    assert found.memory["temporaries"] < ARRAY
    copies = [
        instruction.name
        for computation in found.module.computations
        for instruction in computation.instructions
        if instruction.base_opcode == "copy" and instruction.result.bytes >= ARRAY
    ]
    assert copies == []


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_single_text_gathers_no_weights(topology):
    """XLA for GPUs gathered the table of the embedding for the row of a single token."""
    found, _ = compiled(topology, STEPS, rows=1, mesh="data=1,model=4")
    gathered = [
        instruction.result.bytes
        for computation in found.module.computations
        for instruction in computation.instructions
        if instruction.base_opcode == "all-gather"
    ]
    # The logits of the token, in bfloat16 or float32.
    assert max(gathered, default=0) <= 4 * VOCABULARY


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_plan_counts_the_slots_that_a_kernel_reads(topology):
    found, program = compiled(topology, STEPS)
    operations = hlo.read_operations(found.module, program.mesh, None).operations
    by_name = {operation.name: operation for operation in operations}
    for instruction, share in kernel_calls(found.module, "cache_attention"):
        moved = by_name[instruction.name].bytes
        assert moved - instruction.result.bytes == pytest.approx(2 * ARRAY * share, rel=0.05)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_prompts_are_computed_by_the_fused_attention(topology):
    found, program = compiled(topology, ADMIT)
    assert {(use.kernel, use.obstacle) for use in program.kernels} == {("attention", "")}
    # Less than the keys and values of a device once more.
    assert found.memory["temporaries"] < 2 * LAYERS * ARRAY
