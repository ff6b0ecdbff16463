# tests: wings/planning/search/costs.py, wings/planning/search/cost_model.py
"""Compares the cost model with closed forms: FLOPs, bytes and collectives of single layers."""

import dataclasses
import functools

import pytest
import tensorflow as tf

from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.wings.planning.search.candidates import Tensor, group
from lingvo_gshard.wings.planning.search.choices import Saving
from lingvo_gshard.wings.planning.search.cost_model import CostModel
from lingvo_gshard.wings.planning.search.costs import (
    RESULT,
    Collective,
    Cost,
    ShardedTensor,
    resharding,
    shard_einsum,
)
from lingvo_gshard.wings.planning.search.tracing import UpstreamFinder, trace
from tests.layers.stacks.executions import loop
from tests.planning.search.search_rates import batch, bytes_by_kind, ring_rates, trainer

B, L, M, H, N, V, E, LAYERS = 64, 16, 128, 512, 8, 1024, 8, 4
D = M // N
FLOAT = 4
RATES = ring_rates()


@functools.cache
def layer_groups(experts: bool = False):
    task = TranslationTask.params().set(
        source_vocabulary_size=V, target_vocabulary_size=V, model_dim=M
    )
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=LAYERS, num_heads=N, hidden_dim=H, moe_every=int(experts))
        stack.execution = loop()
        stack.moe.set(num_experts=E, group_size=L)
    return group(trace(trainer(task), batch(B, L)))


def cost(
    name: str,
    mesh: str,
    strategy: str,
    policy: str = "none",
    offloads_moments: bool = False,
    host_bytes_per_second: float = 1e9,
) -> Cost:
    """Returns the cost of all layers of one kind in a step, without their norms."""
    experts = name == "experts"
    (found,) = (g for g in layer_groups(experts).groups if g.name == name)
    pairs = [
        pair
        for pair in zip(found.weights, found.moments, strict=True)
        if pair[0].path.rpartition(".")[0] in found.paths
    ]
    weights, moments = zip(*pairs, strict=True)
    found = dataclasses.replace(found, weights=weights, moments=moments)
    parsed = Mesh.parse(mesh)
    rates = dataclasses.replace(RATES, host_bytes_per_second=host_bytes_per_second)
    model = CostModel(parsed, rates, Saving(policy, offloads_moments))
    return model.group_cost(found, strategies.get(strategy, parsed))


def weights_of_feed_forwards() -> int:
    return 2 * LAYERS * (2 * M * H + H + M) * FLOAT


def activations() -> int:
    return B * L * M * FLOAT


def test_dense_layer_on_one_device():
    found = cost("feed_forward", "data=1", "replicated")
    assert found.flops == 2 * LAYERS * 3 * 2 * (2 * B * L * M * H)
    assert found.weights == found.gradients == weights_of_feed_forwards()
    assert found.saved == 2 * LAYERS * (2 * B * L * M + B * L * H) * FLOAT
    assert found.calls == []


def test_data_parallel_dense_layer():
    found = cost("feed_forward", "data=8", "data")
    assert bytes_by_kind(found) == {"all-reduce": weights_of_feed_forwards()}
    assert found.weights == weights_of_feed_forwards()
    assert found.flops == 2 * LAYERS * 3 * 2 * (2 * B * L * M * H) // 8


def test_tensor_parallel_dense_layer():
    found = cost("feed_forward", "model=8", "tensor")
    assert bytes_by_kind(found) == {"all-reduce": 2 * LAYERS * 2 * activations()}
    biases = 2 * LAYERS * M * FLOAT
    assert found.weights == (weights_of_feed_forwards() - biases) // 8 + biases
    assert found.flops == 2 * LAYERS * 3 * 2 * (2 * B * L * M * H) // 8


def test_fsdp_dense_layer():
    """A loop gathers weights in each pass and reduce-scatters their gradients."""
    found = cost("feed_forward", "data=8", "fsdp")
    matrices = 2 * LAYERS * 2 * M * H * FLOAT
    by_kind = bytes_by_kind(found)
    assert by_kind["all-gather"] == 2 * matrices
    assert by_kind["reduce-scatter"] == matrices + 2 * LAYERS * M * FLOAT
    assert by_kind["all-reduce"] == 2 * LAYERS * H * FLOAT


def test_zero1_dense_layer():
    found = cost("feed_forward", "data=8", "zero1")
    summed = weights_of_feed_forwards()
    handed_on = summed - 2 * LAYERS * H * FLOAT
    assert bytes_by_kind(found) == {"all-reduce": summed, "all-gather": handed_on}


def test_rematerialization_recomputes_unsaved_tensors():
    none, full, products = (
        cost("feed_forward", "model=8", "tensor", policy) for policy in ("none", "full", "products")
    )
    assert full.flops == none.flops * 4 // 3
    assert bytes_by_kind(full)["all-reduce"] == bytes_by_kind(none)["all-reduce"] * 3 // 2
    assert products.flops == none.flops
    # The unit begins with the attention before the feed-forward layer.
    assert full.saved == 0 and full.recomputed > 0
    assert products.saved == 2 * LAYERS * (B * L * M + B * L * H // 8) * FLOAT


def test_activations_in_host_memory_cost_what_computation_does_not_hide():
    fast, slow = 1e18, 1e3
    saved = cost("feed_forward", "model=8", "tensor", "products").saved
    hidden = cost("feed_forward", "model=8", "tensor", "products_offloaded", False, fast)
    assert (hidden.saved, hidden.hosted, hidden.host_seconds) == (0, saved, 0.0)
    exposed = cost("feed_forward", "model=8", "tensor", "products_offloaded", False, slow)
    assert exposed.host_seconds == pytest.approx(2 * saved / slow - exposed.compute_seconds)


def test_moments_in_host_memory_cost_their_copies():
    on_device = cost("feed_forward", "data=8", "zero1")
    offloaded = cost("feed_forward", "data=8", "zero1", "none", True, 1e6)
    assert on_device.moments > 0 and on_device.host_seconds == 0
    assert offloaded.moments == 0
    assert offloaded.host_seconds == pytest.approx(on_device.moments / 1e6)
    assert max(on_device.resident) - max(offloaded.resident) == on_device.moments


@pytest.mark.parametrize("mesh", ["model=1", "model=8", "model=4"])
def test_attention_cost(mesh):
    parts = int(mesh.partition("=")[2])
    found = cost("attention", mesh, "tensor")
    inner = N * D
    attentions = LAYERS + 2 * LAYERS
    flops = 4 * 2 * B * L * M * inner + 2 * 2 * B * L * L * inner
    assert found.flops == attentions * 3 * flops // parts
    # Forward reduces the output. Backward reduces the gradients of queries and encoder output.
    sums = attentions * 2 + LAYERS
    expected = {} if parts == 1 else {"all-reduce": sums * activations()}
    assert bytes_by_kind(found) == expected


def test_expert_parallel_cost():
    """Two all-to-alls each way, capacity 2 S / E as in the paper. Expert gradients stay local."""
    found = cost("experts", "data=8", "expert")
    slots = B * L * 2
    router = 2 * B * L * M * E
    assert found.flops == 2 * LAYERS * 3 * (2 * 2 * slots * M * H + router) // 8
    buffers = slots * M * FLOAT // 8
    by_kind = bytes_by_kind(found)
    assert by_kind["all-to-all"] == 2 * LAYERS * 4 * buffers
    assert by_kind["all-reduce"] == 2 * LAYERS * M * E * FLOAT
    assert found.weights == 2 * LAYERS * (E * 2 * M * H // 8 + M * E) * FLOAT


def test_vocabulary_parallel_lookups_and_softmax():
    found = cost("vocabulary", "model=8", "tensor")
    # Two lookups forward, the softmax's input gradient backward.
    assert bytes_by_kind(found) == {"all-reduce": 3 * activations()}
    assert found.weights == 2 * V * M * FLOAT // 8


def test_rows_of_an_untied_table_are_exchanged():
    """Rows of the source's table travel, forward and backward. The tied table is gathered twice."""
    rows = cost("vocabulary", "data=8", "fsdp")
    assert bytes_by_kind(rows)["all-to-all"] == 2 * activations() // 8
    assert bytes_by_kind(rows)["all-gather"] == 2 * V * M * FLOAT


def operand(layout: str, sizes: dict[str, int], **where: str) -> ShardedTensor:
    shape = tuple(sizes[x] for x in layout)
    return ShardedTensor(Tensor(layout, shape, "float32"), {a: x for a, x in where.items() if x})


def test_padding_counts_as_computation():
    mesh, sizes = Mesh.parse("data=8"), {"B": 9, "M": 4, "H": 4}
    found = shard_einsum(
        (operand("BM", sizes, data="B"), operand("MH", sizes)),
        operand("BH", sizes, data="B"),
        mesh,
        RATES,
    )
    assert found.flops == 2 * 2 * 4 * 4 and found.calls == ()


def test_partial_sums_into_a_sharded_result_are_reduce_scattered():
    mesh, sizes = Mesh.parse("data=8"), {"B": 64, "M": 16, "H": 32}
    gradient = shard_einsum(
        (operand("BM", sizes, data="B"), operand("BH", sizes, data="B")),
        operand("MH", sizes, data="M"),
        mesh,
        RATES,
    )
    assert gradient.calls == ((RESULT, Collective("reduce-scatter", ("data",), 4 * 16 * 32)),)


def test_one_hot_dispatch_needs_one_all_to_all():
    """The paper's dispatch computes by groups and then moves the result in one all-to-all."""
    mesh, sizes = Mesh.parse("data=8"), dict(G=8, S=16, E=8, C=4, M=32)
    found = shard_einsum(
        (operand("GSEC", sizes, data="G"), operand("GSM", sizes, data="G")),
        operand("EGCM", sizes, data="E"),
        mesh,
        RATES,
    )
    assert found.calls == ((RESULT, Collective("all-to-all", ("data",), 4 * 8 * 4 * 32)),)


@pytest.mark.parametrize(
    ("before", "after", "kind", "bytes"),
    [
        ({"data": "G"}, {"data": "E"}, "all-to-all", 4 * 8 * 64 // 8),
        ({"data": "G"}, {}, "all-gather", 4 * 8 * 64),
        ({}, {"data": "G"}, None, 0),
        ({"data": "G"}, {"data": "B"}, None, 0),
        ({"data": "E"}, {"data": "N"}, "all-gather", 4 * 8 * 64),
    ],
)
def test_resharding_collectives(before, after, kind, bytes):
    tensor = Tensor("GEC", (8, 8, 8), "float32")
    calls = resharding(tensor, before, after, Mesh.parse("data=8"))
    assert calls == ([Collective(kind, ("data",), bytes)] if kind else [])


def test_upstream_of_a_sum_is_its_latest_tensor():
    with tf.Graph().as_default():
        a, b = tf.ones([2, 3]), tf.ones([2, 3])
        total = a + b
        mean = total - tf.reduce_mean(total, -1, keepdims=True)
        found = UpstreamFinder({id(a): 0, id(b): 1})
        assert found.nearest(b * 2.0) == (1, True)
        assert found.nearest(total) == (1, True)
        assert found.nearest(mean) == (1, False)
        assert found.nearest(tf.ones([2])) is None
