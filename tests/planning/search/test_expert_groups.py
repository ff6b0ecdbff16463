# tests: wings/planning/search/choices.py, wings/planning/search/candidates.py
"""The search finds groups of experts that are smaller than the data axis."""

import math

import pytest

import lingvo_gshard
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.training.experiments import batch_specs, make_trainer
from lingvo_gshard.wings.planning.search.choices import SAVE_ALL
from lingvo_gshard.wings.planning.search.search import search
from lingvo_gshard.wings.planning.search.tracing import trace
from tests.planning.search.search_rates import ring_rates

EXPERTS, DEVICES = 8, 64
SETTINGS = [
    "task.model_dim = 1024",
    "task.decoder.num_layers = 2",
    "task.decoder.hidden_dim = 4096",
    "task.decoder.moe.group_size = 512",
    "input.batch_rows = 128",
    "input.length = 512",
    "input.vocabulary.size = 8000",
]


@pytest.mark.slow
def test_eight_experts_on_64_devices_are_split_within_groups_of_devices():
    experiment = lingvo_gshard.experiment("language_model.quickstart", settings=SETTINGS)
    assert experiment.task.decoder.moe.num_experts == EXPERTS
    traced = trace(make_trainer(experiment), batch_specs(experiment))
    result = search(traced, DEVICES, ring_rates(), savings=(SAVE_ALL,), most_axes=2)
    best = result.best.candidate
    mesh = Mesh.parse(best.mesh)
    table = strategies.get(best.strategy, mesh)
    assert not any("E->" in override for _, override in best.overrides)
    # Devices along the axes of E hold different experts. All axes split the batch.
    group = math.prod(map(mesh.axis_size, table.weights["E"]))
    assert 1 < group <= EXPERTS < math.prod(map(mesh.axis_size, table.activations["B"]))
    assert table.activations["E"] == table.weights["E"]
    assert result.best.seconds < min(row.cost.seconds for row in result.baselines)
