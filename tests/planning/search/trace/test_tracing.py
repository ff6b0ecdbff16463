"""Checks the einsums, lookups and flows of a traced step, and loop counts."""

import collections
import functools

import tensorflow as tf

from lingvo_gshard.core.flops import FORWARD_AND_BACKWARD, TokenShape
from lingvo_gshard.planning.search.groups import group
from lingvo_gshard.planning.search.trace.graph import TracedStep
from lingvo_gshard.planning.search.trace.tracing import trace
from lingvo_gshard.sharding import annotate, einsum, recording
from tests.layers.stacks.executions import loop, sequential
from tests.planning.search.search_rates import batch, trainer
from tests.runtime import tiny_translation

ROWS, LENGTH = 4, 12


@functools.cache
def model(repeat: bool, moe_every: int = 2):
    task = tiny_translation.trainer().task.p.copy()
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=4, moe_every=moe_every)
        stack.execution = loop() if repeat else sequential()
    return trainer(task)


@functools.cache
def traced(repeat: bool, moe_every: int = 2, rows: int = ROWS) -> TracedStep:
    return trace(model(repeat, moe_every), batch(rows, LENGTH))


def equations(found: TracedStep) -> collections.Counter:
    """How often each product runs, by what it is and in which kind of layer."""
    counted = collections.Counter()
    for p in found.products:
        layer = p.path.rpartition(".")[2]
        counted[p.operands, p.result, layer, p.is_lookup] += p.times
    return counted


def test_einsums_and_annotations_are_recorded_in_order():
    def run(x, w):
        return annotate(tf.nn.relu(einsum("BM,MH->BH", x, w)), "BH")

    with recording.record() as recorded:
        tf.function(run).get_concrete_function(tf.TensorSpec((4, 2)), tf.TensorSpec((2, 3)))
    assert [e.equation for e in recorded.events if not e.is_annotation] == ["BM,MH->BH"]
    assert [e.equation for e in recorded.events if e.is_annotation] == ["BH->BH", "BH->BH"]
    run(tf.ones((4, 2)), tf.ones((2, 3)))
    assert len(recorded.events) == 3


def test_loop_is_traced_like_separate_layers():
    loop, unrolled = traced(True), traced(False)
    assert equations(loop) == equations(unrolled)
    assert {p.times for p in loop.products if ".body[" in p.path} == {2}
    assert len(loop.products) < len(unrolled.products)


def test_traced_flops_match_the_model_size():
    """Without experts nothing is padded or dispatched: three times the forward products."""
    found = traced(True, moe_every=0)
    flops = 0
    for product in found.products:
        if not product.is_lookup:
            work = 2 * product.times
            for size in product.sizes.values():
                work *= size
            flops += 3 * work
    shape = TokenShape(ROWS, LENGTH, memory_length=LENGTH)
    assert flops == FORWARD_AND_BACKWARD * model(False, 0).task.flops(shape)


def test_tracing_large_models_allocates_no_weights():
    assert traced(True, 0, rows=2**20).products[0].result.shape[0] == 2**20


def test_einsums_record_their_weights():
    found = traced(False)
    used = {path for product in found.products for path in product.weights}
    matrices = {spec.path for spec in found.weights if len(spec.shape) > 1}
    assert used == matrices
    (gate,) = {
        operand.unsplit
        for product in found.products
        for operand in product.operands
        if operand.layout == "ME"
    }
    assert gate == "E"


def test_lookups_are_recorded_as_one_hot_einsums():
    lookups = [p for p in traced(False).products if p.is_lookup]
    assert [(p.operands[0].layout, p.operands[1].layout) for p in lookups] == [("BLV", "VM")] * 2
    assert [p.is_tied for p in lookups] == [False, True]


def test_tokens_flow_to_experts_and_back():
    mixture = "encoder.layers[1].feed_forward"
    flows = [
        (f.source.layout, f.target.layout)
        for f in traced(False).flows
        if {f.source_path, f.target_path} <= {mixture, f"{mixture}.experts"}
        and f.source.layout != f.target.layout
    ]
    assert flows == [("GSM", "GECM"), ("GECM", "EGCM"), ("EGCM", "GECM"), ("GECM", "GSM"),
                     ("GSM", "BLM")]  # fmt: skip


def test_flows_connect_loops_with_their_neighbors():
    flows = {
        (f.source_path, f.target_path, f.times)
        for f in traced(True).flows
        if f.source.layout == f.target.layout == "BLM"
    }
    assert ("source_embedding", "encoder.layers", 1) in flows
    assert ("decoder.layers", "target_embedding", 1) in flows
    layer = "encoder.layers.body[0]"
    assert (f"{layer}.self_attention", layer, 2) in flows
    assert (layer, f"{layer}.feed_forward", 2) in flows
    assert not any(source == "positions" for source, _, _ in flows)


def test_layers_are_grouped_by_weight_letters():
    for repeat in (True, False):
        grouped = group(traced(repeat))
        assert [g.name for g in grouped.groups] == [
            "experts", "vocabulary", "attention", "feed_forward"
        ]  # fmt: skip
        assert sum(len(g.weights) for g in grouped.groups) == len(traced(repeat).weights)
        assert sum(len(g.products) for g in grouped.groups) == len(traced(repeat).products)


def test_saved_tensors_are_counted_once():
    """Of a feed-forward layer: its normalized input, its hidden units, and the sum it adds to."""
    found = traced(False)
    saved = [
        tensor.layout
        for product in found.products
        if product.path == "encoder.layers[0].feed_forward"
        for tensor in product.saved
    ]
    assert saved == ["BLM", "BLH", "BLM"]
