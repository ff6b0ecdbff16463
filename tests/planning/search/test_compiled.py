# tests: wings/planning/search/cost_model.py
"""Compares the cost model with compiled training steps: bytes of collectives and peak memory.

The compiler also adds reductions of metrics, norms and optimizer means. XLA's CPU compiler has
no reduce-scatter; it all-reduces gradients and slices them.
"""

import collections
import functools

import jax
import pytest

from lingvo_gshard.runtime.program.program import memory_bytes
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.planning.search.candidates import LayerGroups, group
from lingvo_gshard.wings.planning.search.cost_model import CostModel
from lingvo_gshard.wings.planning.search.tracing import trace
from tests.planning.search.search_rates import batch, bytes_by_kind, ring_rates, trainer
from tests.runtime import tiny_translation

# Largest relative error for the bytes of each kind of collective, and for the peak memory.
MOST_BETWEEN, MOST_MEMORY_BETWEEN = 0.12, 0.3


@functools.cache
def model(micro_batches: int = 1) -> Trainer:
    """Returns a trainer of one encoder layer with experts and one dense decoder layer."""
    task = tiny_translation.trainer().task.p.copy()
    task.encoder.set(num_layers=1, moe_every=1)
    task.decoder.set(num_layers=1, moe_every=0)
    return trainer(task, micro_batches=micro_batches)


@functools.cache
def layer_groups(rows: int = 8, micro_batches: int = 1) -> LayerGroups:
    return group(trace(model(), batch(rows, 12), micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        pytest.param("data=8", "data", marks=pytest.mark.slow),
        pytest.param("data=8", "expert", marks=pytest.mark.slow),
        ("model=8", "tensor"),
        pytest.param("data=8", "fsdp", marks=pytest.mark.slow),
        pytest.param("data=8", "zero1", marks=pytest.mark.slow),
        pytest.param("data=4,model=2", "expert_tensor", marks=pytest.mark.slow),
    ],
)
def test_collective_bytes_and_peak_memory_match_the_compiler(mesh, strategy):
    check_cost(mesh, strategy, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert", "fsdp"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_repeat_communication_in_less_memory(strategy, micro_batches):
    check_cost("data=8", strategy, 32, micro_batches)


def check_cost(mesh: str, strategy: str, rows: int, micro_batches: int) -> None:
    """Compares the cost model with the compiled step of `rows` rows."""
    partitioning = Partitioning.make(mesh, strategy)
    program, _ = train_program(model(micro_batches), partitioning, "gspmd", batch(rows, 12))
    compiled = program.lower(jax.devices()[:8]).compile()
    parsed = Mesh.parse(mesh)
    operations = hlo.read_operations(hlo.read_module(compiled), parsed)
    moved = collections.Counter()
    for collective in hlo.collective_calls(operations.operations):
        moved[collective.kind] += collective.bytes * collective.times

    groups = layer_groups(rows, micro_batches)
    tables = [strategies.get(strategy, parsed)] * len(groups.groups)
    cost = CostModel(parsed, ring_rates(), micro_batches=micro_batches).cost(groups, tables)
    expected = collections.Counter(bytes_by_kind(cost))
    expected["all-reduce"] += expected.pop("reduce-scatter", 0)
    assert set(moved) == set(+expected)
    for kind, bytes in moved.items():
        assert abs(expected[kind] - bytes) <= MOST_BETWEEN * bytes, kind

    peak = memory_bytes(compiled)["peak"]
    assert abs(cost.peak - peak) <= MOST_MEMORY_BETWEEN * peak
