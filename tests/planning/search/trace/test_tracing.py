"""Checks the einsums, lookups and flows of a traced step, and loop counts."""

import collections
import functools
import math

import pytest
import tensorflow as tf

from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.sharding import annotate, einsum, recording
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.step import FORWARD_AND_BACKWARD
from lingvo_gshard.wings.planning.search.candidates import TracedStep, group
from lingvo_gshard.wings.planning.search.tracing import trace
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


def equations(step: TracedStep) -> collections.Counter:
    """Counts the executions of each einsum by its tensors and its layer."""
    counted = collections.Counter()
    for e in step.einsums:
        layer = e.path.rpartition(".")[2]
        counted[e.operands, e.result, layer, e.is_lookup] += e.times
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


@pytest.mark.slow
def test_loop_is_traced_like_separate_layers():
    loop, unrolled = traced(True), traced(False)
    assert equations(loop) == equations(unrolled)
    assert {p.times for p in loop.einsums if ".body[" in p.path} == {2}
    assert len(loop.einsums) < len(unrolled.einsums)


def test_traced_flops_match_the_model_size():
    """A dense model has no padding or dispatch. Einsums compute the keys that masks hide, too."""
    step = traced(True, moe_every=0)
    traced_flops = 0
    for e in step.einsums:
        if not e.is_lookup:
            traced_flops += 3 * 2 * e.times * math.prod(e.sizes.values())
    shape = TokenShape(ROWS, LENGTH, memory_length=LENGTH)
    task = model(False, 0).task
    p, hidden = task.p.decoder, LENGTH * (LENGTH - 1) // 2
    masked = 2 * 2 * ROWS * hidden * task.p.model_dim * p.num_layers
    assert traced_flops == FORWARD_AND_BACKWARD * (flops(task, shape) + masked)


def test_tracing_large_models_allocates_no_weights():
    assert traced(True, 0, rows=2**20).einsums[0].result.shape[0] == 2**20


def test_einsums_record_their_weights():
    step = traced(False)
    used = {path for e in step.einsums for path in e.weights}
    matrices = {spec.path for spec in step.weights if len(spec.shape) > 1}
    assert used == matrices
    (gate,) = {
        operand.unsplit for e in step.einsums for operand in e.operands if operand.layout == "ME"
    }
    assert gate == "E"


def test_lookups_are_recorded_as_one_hot_einsums():
    lookups = [e for e in traced(False).einsums if e.is_lookup]
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
        layer_groups = group(traced(repeat))
        assert [g.name for g in layer_groups.groups] == [
            "experts", "vocabulary", "attention", "feed_forward"
        ]  # fmt: skip
        assert sum(len(g.weights) for g in layer_groups.groups) == len(traced(repeat).weights)
        assert sum(len(g.einsums) for g in layer_groups.groups) == len(traced(repeat).einsums)


def test_saved_tensors_are_counted_once():
    """A feed-forward layer saves its normalized input, its hidden units and the residual stream."""
    step = traced(False)
    saved = [
        tensor.layout
        for e in step.einsums
        if e.path == "encoder.layers[0].feed_forward"
        for tensor in e.saved
    ]
    assert saved == ["BLM", "BLH", "BLM"]
