# tests: wings/planning/search/search.py, wings/planning/search/choices.py
# tests: wings/planning/search/results.py
"""Checks which shardings the search finds, and how compilations decide."""

import dataclasses
import functools

import pytest

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search.candidates import TracedStep
from lingvo_gshard.wings.planning.search.choices import SAVE_ALL, Saving, Variant
from lingvo_gshard.wings.planning.search.experiment_search import rates_of
from lingvo_gshard.wings.planning.search.results import CompiledCost, SearchResult
from lingvo_gshard.wings.planning.search.search import search
from lingvo_gshard.wings.planning.search.tracing import trace
from tests.planning.search.search_rates import batch, dense, ring_rates
from tests.runtime import tiny_translation


def strategy(result: SearchResult) -> tuple[Mesh, Strategy]:
    found = result.best.candidate
    mesh = Mesh.parse(found.mesh)
    return mesh, strategies.get(found.strategy, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "policy"),
    [(12, "none"), (36, "products_but_hidden")],
)
def test_search_shards_the_papers_moe_as_the_paper_did(layers, policy):
    """On 512 TPU v3 cores, one axis shards groups and 512 experts; the rest is replicated."""
    experiment = registry.get(f"gshard_paper.moe_512e_{layers}l")
    experiment.task.set(source_vocabulary_size=64000, target_vocabulary_size=32000)
    task = experiment.task.instantiate()
    rows, length = experiment.input.batch_rows, experiment.input.source_length
    traced = trace(experiment.step.instantiate(task, experiment.run.steps), batch(rows, length))
    topology = topologies.get("v3:16x16")
    result = search(traced, topology.devices, rates_of(topology), most_axes=2)
    assert result.best.candidate.mesh == "data=512"
    # Tables of which a step reads few rows are split, too: their rows travel by all-to-alls.
    split = {pattern for pattern, _ in result.best.candidate.overrides}
    assert split <= {"source_embedding", "target_embedding"}
    _, tables = strategy(result)
    assert tables.activations == dict.fromkeys("BGE", ("data",))
    assert tables.weights == tables.moments == {"E": ("data",)}
    assert result.best.candidate.rematerialize == policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "rows"),
    [("v4:2x2x2", 4, 8), ("v4:2x2x4", 8, 16)],
)
def test_wide_model_on_few_chips_is_sharded_like_megatron(name, layers, rows):
    """On 8 and 16 chips with one row each, heads, hidden units and vocabulary are sharded."""
    topology = topologies.get(name)
    traced = trace(dense(16384, 65536, layers, 128, "bfloat16"), batch(rows, 512))
    result = search(traced, topology.devices, rates_of(topology), most_axes=2)
    _, tables = strategy(result)
    assert result.best.candidate.mesh == f"model={topology.devices}"
    assert not result.best.candidate.overrides
    assert tables.activations == tables.weights == dict.fromkeys("HNV", ("model",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model_dim", "dtype"), [("v4:8x8x4", 4096, "bfloat16"), ("v3:16x16", 2048, "float32")]
)
def test_deep_model_on_many_chips_is_sharded_like_zero(name, model_dim, dtype):
    """With 96 layers and 1 to 2 million tokens, weights are sharded and gathered on use."""
    topology = topologies.get(name)
    trainer = dense(model_dim, 4 * model_dim, 96, model_dim // 128, dtype)
    traced = trace(trainer, batch(4096, 512))
    result = search(traced, topology.devices, rates_of(topology), most_axes=2)
    mesh, tables = strategy(result)
    assert set(tables.activations["B"]) == set(mesh.names)
    assert set(tables.activations) == {"B"}
    assert set(tables.weights) == {"M"}
    assert mesh.axis_size(tables.weights["M"][0]) >= 64
    split = {pattern for pattern, _ in result.best.candidate.overrides}
    assert split <= {"source_embedding", "target_embedding"}
    data_parallel = next(row for row in result.baselines if row.name == "data")
    assert data_parallel.cost.peak > result.capacity


CAPACITY = 350_000


@functools.cache
def tiny() -> TracedStep:
    return trace(tiny_translation.trainer(), batch(8, 12))


def run(**options) -> SearchResult:
    """Searches with slow devices of limited memory, for which sharding is useful."""
    rates = ring_rates(CAPACITY, flops_per_second=1e9)
    return search(
        tiny(), 8, rates, savings=(Saving("none"), Saving("full")), most_axes=2, **options
    )


def test_cost_model_decides_without_a_compiler():
    result = run()
    assert result.best is result.rows[0]
    assert not any(row.compiled for row in result.rows)
    peaks = [row.peak for row in result.front]
    seconds = [row.seconds for row in result.front]
    assert peaks == sorted(peaks, reverse=True) and seconds == sorted(seconds)
    beyond = {"folded", "sequence", "context", "pipeline"}
    joined = {"expert_fsdp", "expert_tensor", "fsdp_tensor"}
    names = {row.name for row in result.baselines}
    assert names == set(strategies.base_names()) - beyond | joined
    listed = [row for row in (*result.front, *result.baselines) if result.fits(row)]
    assert result.best.seconds == min(row.seconds for row in listed)


def test_a_candidate_faster_than_the_bound_is_an_error_and_never_chosen():
    fastest = run().best.seconds
    result = run(seconds_bound=1.01 * fastest)
    assert result.best.seconds >= 1.01 * fastest
    left_out = [row for row in (*result.rows, *result.baselines) if row.problem]
    assert left_out and all(row.seconds < 1.01 * fastest for row in left_out)
    assert not any(row in result.front for row in left_out)
    (note,) = result.notes
    assert "error of the cost model, please report it" in note


def test_host_memory_is_used_only_where_the_step_would_not_fit():
    savings = [
        Saving(policy, moments) for moments in (False, True) for policy in remat_policy.POLICIES
    ]
    rates = dataclasses.replace(ring_rates(CAPACITY, 1e9), host_bytes_per_second=1e6)
    roomy = search(tiny(), 1, dataclasses.replace(rates, capacity=2**34), savings=savings)
    assert roomy.best.candidate.rematerialize == "none"
    assert not roomy.best.candidate.offload_moments
    peaks = {row.cost.peak for row in roomy.rows if not row.candidate.offload_moments}
    tight = dataclasses.replace(rates, capacity=int(min(peaks) / 0.9) - 2)
    on_device = search(tiny(), 1, tight, savings=[s for s in savings if not s.offloads_moments])
    assert on_device.best is None
    found = search(tiny(), 1, tight, savings=savings).best
    assert found.candidate.offload_moments
    assert found.cost.host_seconds > 0 and found.cost.moments == 0
    assert "step.offload_moments = True" in found.candidate.settings()


def test_compiled_times_rank_the_best_candidates():
    compiled = {}

    def compile_candidate(candidate):
        compiled[candidate] = CompiledCost(True, 1000, 10.0 - len(compiled))
        return compiled[candidate]

    result = run(compile_candidate=compile_candidate, compile_best=3)
    # The best named strategy comes after the candidates.
    assert len(compiled) == 4 and not any("->" in c.strategy for c in list(compiled)[3:])
    assert result.best.candidate == list(compiled)[-1] and result.best.seconds == 7.0
    assert result.best in result.baselines
    assert all(row.compiled for row in result.front)


def test_smaller_candidates_are_tried_if_compiled_memory_exceeds_capacity():
    sizes = []
    result = run()
    of = {row.candidate: row.cost.peak for row in (*result.rows, *result.baselines)}
    excess = CAPACITY / result.best.cost.peak * 1.1

    def compile_candidate(candidate):
        sizes.append(of[candidate])
        peak = int(of[candidate] * excess)
        return CompiledCost(peak <= CAPACITY, peak, 1.0)

    result = run(compile_candidate=compile_candidate, compile_best=6)
    assert len(sizes) > 1 and min(sizes) < sizes[0]
    assert result.best.compiled.fits and not result.rows[0].compiled.fits


def test_compilation_failures_are_reported():
    def compile_candidate(candidate):
        raise UserError("too large")

    result = run(compile_candidate=compile_candidate, compile_best=2)
    assert result.best is None and result.front == ()
    assert [row.problem for row in result.rows].count("too large") == 2


def test_variants_are_kept_that_make_the_best_candidate_faster():
    """The first is faster, the second by too little, the third does not fit, the last fails."""
    seconds = {("", ()): 1.0, ("E", ()): 0.8, ("E", ("a",)): 0.795, ("E", ("b",)): 0.5}

    def compile_candidate(candidate):
        key = candidate.dispatch, candidate.compile_options
        if key not in seconds:
            raise UserError("refused")
        return CompiledCost("b" not in candidate.compile_options, 1000, seconds[key])

    variants = Variant("E"), *(Variant(compile_options=(name,)) for name in "abc")
    result = run(compile_candidate=compile_candidate, compile_best=1, variants=variants)
    best = result.best.candidate
    assert (best.dispatch, best.compile_options, result.best.seconds) == ("E", (), 0.8)
    tried = [row for row in result.rows if row.candidate.dispatch]
    assert [row.problem for row in tried] == ["", "", "", "refused"]
    assert [row.candidate.compile_options for row in tried] == [(), ("a",), ("b",), ("c",)]


def test_micro_batches_make_a_step_fit():
    """In less memory than any sharding of the whole batch needs, parts of it are computed."""
    parts = [trace(tiny_translation.trainer(), batch(64, 12), parts) for parts in (1, 4)]
    assert [step.micro_batches for step in parts] == [1, 4]
    sizes = range(0, 2**23, 2**17)
    alone = next(size for size in sizes if size and _searched(parts[0], size).best)
    capacity = alone - 2**17
    best = _searched(parts[0], capacity, others=parts[1:]).best
    assert best.candidate.micro_batches == 4 and best.peak < capacity


def _searched(step: TracedStep, capacity: int, **options) -> SearchResult:
    return search(step, 8, ring_rates(capacity), savings=(SAVE_ALL,), most_axes=1, **options)


def test_smallest_candidate_is_returned_if_none_fits():
    result = search(tiny(), 8, ring_rates(capacity=1000), savings=(SAVE_ALL,), most_axes=1)
    assert result.best is None
    assert result.rows and min(row.peak for row in result.rows) > 1000


def test_one_device_needs_no_sharding():
    result = search(tiny(), 1, ring_rates(), savings=(SAVE_ALL,))
    assert result.best.cost.calls == []
