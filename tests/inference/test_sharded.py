# tests: wings/inference/programs/executables.py, wings/inference/programs/maker.py
# tests: wings/inference/loading.py, wings/inference/decoding/state.py
"""Tests decoding over a mesh: results, the weights of each device, and a step's collectives."""

import collections
import fnmatch
import functools
import math

import pytest

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo.collectives import collectives
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.decoding.state import StateShape
from lingvo_gshard.wings.inference.loading import make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs.executables import PREPARE, STEPS, ProgramKey
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.decoding import tiny_model
from tests.inference.tiny_engine import BOS, EOS
from tests.layers.stacks.executions import loop, pipeline

# Eleven texts: no multiple of the devices.
REQUESTS = [
    Request(
        source=(3 + n % 5, 4 + n % 7, EOS),
        given=(BOS,),
        options=DecodingOptions(beam_size=2, best=2, most_tokens=6),
    )
    for n in range(11)
]

# Pattern of a weight's path -> pieces that it is cut into. The vocabulary has 13 ids, which do not
# divide evenly, so that embeddings and softmax are whole.
TENSOR = {
    "*attention.w_*": 2,
    "*.layers[[]0].feed_forward.w_*": 2,
    "*.layers[[]0].feed_forward.b_in": 2,
    "*.experts*.w_*": 2,
}
EXPERT_TENSOR = {"*.experts.w_*": 8} | TENSOR
# Of each of 2 layers: self-attention, cross-attention, and feed-forward layer or experts. One
# more is for the embedding, whose rows are split while a step computes.
TENSOR_SUMS = {("all-reduce", ("model",)): 7, ("all-gather", ("model",)): 1}


@functools.cache
def decoded(mesh="", strategy="", execution=None):
    """Returns the hypotheses of each request, and the engine.

    Args:
      mesh: the mesh; empty for one device.
      strategy: the strategy.
      execution: makes the Params of the stacks' execution, whose layers then all have experts;
        None for layers one by one, the last of which has.
    """
    model = tiny_engine.translation_model()
    if execution:
        params = model.task.p.copy()
        for stack in (params.encoder, params.decoder):
            stack.set(moe_every=1, execution=execution())
        task = params.instantiate()
        model = tiny_engine.Model(task, tiny_model.theta(task, seed=1, scale=2.0))
    partitioning = Partitioning.make(mesh, strategy) if mesh else None
    devices = jax.devices()[: partitioning.mesh.size] if partitioning else ()
    facts = model_facts(model.task, 0, BOS, (EOS,))
    with make_engine(model.task, model.theta, facts, partitioning, devices) as engine:
        found = [answer.result() for answer in engine.submit_all(REQUESTS)]
    return found, engine


def check_results(mesh, strategy, execution=None):
    on_mesh, _ = decoded(mesh, strategy, execution)
    on_one_device, _ = decoded(execution=execution)
    for mine, theirs in zip(on_mesh, on_one_device, strict=True):
        assert [h.tokens for h in mine] == [h.tokens for h in theirs]
        assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], abs=1e-4)


def check_weights(mesh, strategy, pieces, execution=None):
    """Compares the bytes of each weight on a device with those of a table of pieces."""
    _, engine = decoded(mesh, strategy, execution)
    arrays = engine.executables.program(ProgramKey(PREPARE)).outputs
    for array, weight in zip(arrays, engine.weights, strict=True):
        count = next(
            (n for pattern, n in pieces.items() if fnmatch.fnmatch(array.path, pattern)), 1
        )
        wanted = 4 * math.prod(array.shape) // count
        held = {shard.data.nbytes for shard in weight.addressable_shards}
        assert held == {wanted}, array.path


def step_collectives(mesh, strategy, rows, least_bytes=0):
    """Returns how many collectives of each kind and axes the loop over steps has.

    Args:
      mesh: the mesh.
      strategy: the strategy.
      rows: rows of the state.
      least_bytes: those that move less are not counted.
    """
    _, engine = decoded(mesh, strategy)
    key = ProgramKey(STEPS, REQUESTS[0].options.kind, StateShape(rows, 32, 32))
    assert engine.executables.is_ready(key)
    module = hlo.read_module(engine.executables.get(key).call)
    found = [
        collective
        for computation in in_loops(module.entry)
        for instruction in computation.instructions
        for _, collective in collectives(instruction, Mesh.parse(mesh))
    ]
    return collections.Counter((c.kind, c.axes) for c in found if c.bytes >= least_bytes)


def in_loops(computation, is_inside=False):
    """Returns the computations that loops below a computation run."""
    found = [computation] if is_inside else []
    for instruction in computation.instructions:
        if instruction.opcode != "fusion":
            for called in instruction.called:
                found += in_loops(called, is_inside or instruction.opcode == "while")
    return list(dict.fromkeys(found))


@pytest.mark.slow
def test_data_decodes_eight_batches_at_once_with_whole_weights():
    check_results("data=8", "data")
    check_weights("data=8", "data", {})
    # Whether any row is under way.
    assert step_collectives("data=8", "data", rows=64) == {("all-reduce", ("data",)): 1}


@pytest.mark.slow
def test_weights_stay_cut_over_experts_heads_and_hidden_units():
    check_results("data=4,model=2", "expert_tensor")
    check_weights("data=4,model=2", "expert_tensor", EXPERT_TENSOR)
    found = step_collectives("data=4,model=2", "expert_tensor", rows=32, least_bytes=256)
    # Tokens and their choices are gathered. XLA for CPU scatters a sum by an all-reduce.
    assert found == TENSOR_SUMS | {("all-gather", ("data",)): 2, ("all-reduce", ("data",)): 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy", "pieces"),
    [
        ("data=4", "expert", {"*.experts.w_*": 4}),
        ("data=4", "fsdp", {"*.b_in": 1, "*": 4}),
        ("data=4", "zero1", {}),
        ("model=2", "tensor", TENSOR),
        ("model=2", "tensor_sequence", TENSOR),
        ("data=2,context=2", "data_context", {}),
        ("stage=2,data=2", "data_pipeline", {}),
        ("data=2,fsdp=2,model=2", "fsdp_expert_tensor", None),
        ("data=2,model=2", "folded_tensor", {"*.experts.w_*": 4} | TENSOR),
        ("data=2", "B,G->data; E->data", {"*.experts.w_*": 2}),
    ],
)
def test_every_strategy_finds_what_one_device_finds(mesh, strategy, pieces):
    check_results(mesh, strategy)
    if pieces is not None:
        check_weights(mesh, strategy, pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution", [loop, functools.partial(pipeline, 2)], ids=["loop", "pipeline"]
)
def test_weights_of_stacked_layers_stay_cut(execution):
    mesh, strategy = "data=2,model=2,stage=2", "expert_tensor_pipeline"
    check_results(mesh, strategy, execution)
    pieces = {"*attention.w_*": 2, "*.experts.w_*": 4}
    check_weights(mesh, strategy, pieces, execution)
