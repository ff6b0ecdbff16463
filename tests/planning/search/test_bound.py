# tests: wings/planning/search/execution.py, wings/planning/search/balanced_dispatch.py
# tests: wings/planning/search/cost_model.py, wings/planning/search/exchanges.py
"""Holds the cost model of published models against products counted by hand."""

import functools
import json

import pytest

from lingvo_gshard.api.importing import open_model
from lingvo_gshard.layers.moe.dispatches import GatherDispatch
from lingvo_gshard.training.experiments import batch_specs
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search import experiment_search
from lingvo_gshard.wings.planning.search.candidates import TracedStep
from lingvo_gshard.wings.planning.search.choices import ChoicePaths, Saving
from lingvo_gshard.wings.planning.search.search import search

LAYERS, ROWS, LENGTH = 2, 8, 4096
DENSE, SPARSE = (f"docs/planned/configs/{name}.json" for name in ("llama-3.1-8b", "mixtral-8x7b"))
MACHINES = ("v5p:2x2x1", "gpu:h100:1x4")
KINDS = ("dense", "capacity", "dropless")


def experiment(kind: str):
    path = DENSE if kind == "dense" else SPARSE
    settings = [f"input.batch_rows = {ROWS}", f"task.decoder.num_layers = {LAYERS}"]
    params = open_model(path, length=LENGTH, precision="bfloat16", settings=settings)
    if kind == "capacity":
        params.task.decoder.moe.dispatch = GatherDispatch.params()
        params.task.decoder.moe.router.capacity_factor = 1.0
    return params


@functools.cache
def traced(kind: str, machine: str) -> TracedStep:
    params, topology = experiment(kind), topologies.get(machine)
    paths, batch = ChoicePaths.of(params), batch_specs(params)
    return next(iter(experiment_search.traced_steps(params, paths, batch, (), topology)))


def products_by_hand(kind: str) -> int:
    """Returns the FLOPs of a step: 2 x M x N x K for each product, three times."""
    with open(DENSE if kind == "dense" else SPARSE) as file:
        config = json.load(file)
    model, hidden = config["hidden_size"], config["intermediate_size"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    dim, tokens = model // heads, ROWS * LENGTH
    projections = 2 * tokens * model * dim * (2 * heads + 2 * shared)
    visible = sum(range(1, LENGTH + 1))
    attention = 2 * (2 * ROWS * visible * heads * dim)
    experts = 1 if kind == "dense" else config["num_experts_per_tok"]
    feed_forward = experts * 3 * 2 * tokens * model * hidden
    router = 0 if kind == "dense" else 2 * tokens * model * config["num_local_experts"]
    layer = projections + attention + feed_forward + router
    return 3 * (LAYERS * layer + 2 * tokens * model * config["vocab_size"])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_candidate_takes_less_than_its_products_at_the_peak(kind, machine):
    topology = topologies.get(machine)
    peak = topology.devices * topology.chip.peak("bfloat16")
    bound = products_by_hand(kind) / peak
    rates = experiment_search.rates_of(topology)
    savings = (Saving("none"), Saving("full"))
    result = search(traced(kind, machine), topology.devices, rates, savings=savings, most_axes=2)
    rows = [*result.rows, *result.baselines]
    assert min(row.cost.seconds for row in rows) > bound
    assert not any(row.problem for row in rows)
    # The rates are 70% of the peak and more. Kernels of attention compute the logits once more,
    # and hidden keys of visible blocks.
    assert result.best.seconds < 2 * bound
    computed = min(row.cost.flops for row in rows if row.candidate.rematerialize == "none")
    assert products_by_hand(kind) <= computed * topology.devices <= 1.1 * products_by_hand(kind)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_bound_of_a_search_is_that_of_the_products_by_hand(machine):
    topology = topologies.get(machine)
    params = experiment("dropless")
    found = experiment_search.seconds_bound(
        params, batch_specs(params), [traced("dropless", machine)], topology
    )
    peak = topology.devices * topology.chip.peak("bfloat16")
    assert found == pytest.approx(products_by_hand("dropless") / peak, rel=1e-6)


def test_a_dropless_layer_computes_whole_experts_on_each_device_that_splits_no_tokens():
    """`tensor` splits hidden units, which a dropless dispatch gathers: devices repeat the work."""
    topology = topologies.get("v5p:2x2x1")
    rates = experiment_search.rates_of(topology)
    step = traced("dropless", "v5p:2x2x1")
    result = search(step, topology.devices, rates, savings=(Saving("none"),), most_axes=1)
    by_name = {row.name: row.cost for row in result.baselines}
    experts = sum(
        3 * 2 * e.times * ROWS * LENGTH * 2 * 4096 * 14336 for e in step.einsums if e.is_dropless
    )
    more = by_name["tensor"].flops - by_name["expert"].flops
    assert more == pytest.approx(experts * (1 - 1 / topology.devices), rel=0.05)
