# tests: /docs/planned/, /docs/planned_and_published.md
"""Tests the plans of published models: their data, their part of the page, and a cell's plan."""

import json

import msgspec
import pytest

from docs.counted.__main__ import weights_of
from docs.planned import cells, families, machines, models, page, setups
from docs.planned.published import page as published
from lingvo_gshard.wings.planning.compiling.compilation import TooLargeError
from lingvo_gshard.wings.planning.machines import topologies

FOUND = cells.load()
PLACED = [cell for cell in FOUND.values() if cell.topology]
MACHINES = {machine.key: machine for machine in machines.MACHINES}
MODELS = {model.key: model for model in models.MODELS}
# What is planned anew.
ROWS = [
    ("llama-3.1-8b", "gpu:h100", cells.TRAINING),
    ("llama-3.1-8b", "v5p", "generation 1"),
]


@pytest.mark.parametrize("model", models.MODELS, ids=lambda model: model.key)
def test_parameters_are_those_that_are_published(model):
    total, active = page.counts(model)
    assert total / 1e9 == pytest.approx(model.parameters, rel=0.01)
    assert active <= total


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.key)
def test_the_first_layers_of_new_families_are_models_that_fit(family):
    cut = families.first_layers(family.values, family.layers)
    assert cut.get("text_config", cut)["num_hidden_layers"] == family.layers < family.depth
    # The first layers of a model with experts may be dense.
    share = weights_of(cut) / weights_of(family.values)
    assert 0.3 * family.layers / family.depth < share < 0.5
    for machine, name in families.MACHINES.items():
        cell = families.load()[family.key, machine, families.WORK]
        assert cell.topology == name and cell.peak <= cell.capacity
        assert cell.tokens_per_second == pytest.approx(cell.tokens / cell.seconds, rel=1e-6)


def test_every_config_belongs_to_a_model():
    assert {path.stem for path in models.CONFIGS.iterdir()} == set(MODELS)
    for model in models.MODELS:
        assert "quantization_config" not in json.loads(model.config.read_text())
        assert model.repository.count("/") == 1


def test_the_page_is_up_to_date():
    made = page.text(FOUND)
    assert made in published.PAGE.read_text(encoding="utf-8"), "out of date: python -m docs.planned"
    assert "{" not in made.replace("{'", "")


def test_slices_are_tried_from_small_to_large():
    for machine in machines.MACHINES:
        chips = [topologies.get(name).chips for name in machine.topologies]
        assert chips == sorted(set(chips)) and chips[0] == 1


def test_every_mesh_of_a_slice_is_tried_before_a_larger_slice(monkeypatch):
    tried = []

    def planned(cell, setup, topology, work):
        tried.append((topology.name, setup.mesh))
        if len(tried) == 2:
            raise TooLargeError("far more memory")
        if topology.chips == 8:
            raise ValueError("the compiler crashed")
        fits = topology.chips == 16
        return msgspec.structs.replace(cell, topology=topology.name) if fits else None

    monkeypatch.setattr(cells, "_planned", planned)
    made = cells.make(MODELS["olmoe-1b-7b"], MACHINES["v6e"], "generation 64", say=lambda _: None)
    assert (made.topology, made.too_small, made.rejected) == ("v6e:4x4", ("v6e:2x2",), ("v6e:2x4",))
    meshes = [mesh for name, mesh in tried if name == "v6e:2x2"]
    assert meshes == ["data=4,model=1", "data=2,model=2", "data=1,model=4"]
    # A compiler that crashes is not asked again for the same slice.
    assert len([name for name, _ in tried if name == "v6e:2x4"]) == 1


@pytest.mark.parametrize("cell", PLACED, ids=lambda cell: " ".join(cell.key))
def test_cells_are_consistent(cell):
    topology = topologies.get(cell.topology)
    assert cell.topology in MACHINES[cell.machine].topologies and cell.work in cells.WORKS
    assert cell.capacity == topology.chip.usable_bytes
    # The compiler of TPUs says whether a step fits. The sum of buffers counts shared memory twice.
    assert cell.peak <= cell.capacity * (1.25 if cell.compiler == "tpu" else 1)
    assert (cell.devices, cell.chips) == (topology.devices, topology.chips)
    assert cell.tokens_per_second == pytest.approx(cell.tokens / cell.seconds, rel=1e-6)
    assert 0 < cell.mfu < 1
    assert cell.compiler == topology.kind
    trained = cell.work in cells.TRAINED
    rows = setups.TRAINED_LENGTH * cell.devices
    assert cell.tokens == (rows if trained else int(cell.work.split()[1]))
    hours = topology.chips * cell.seconds / cell.tokens * 1e9 / 3600
    price = topology.chip.price
    assert cell.price == (price and pytest.approx(price.amount * hours, rel=1e-6))
    # Whatever a step does, it reads the weights that a token uses, all devices together.
    used = 2 * page.counts(MODELS[cell.model])[1]
    bandwidth = topology.chip.memory_bandwidth * topology.devices
    if cell.work == "generation 1":
        assert cell.seconds > 0.8 * used / bandwidth


@pytest.mark.slow
@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_a_row_is_planned_again(key):
    model, machine, work = key
    if topologies.get(MACHINES[machine].topologies[0]).compiler == "cpu":
        pytest.skip("its compiler is not installed")
    found, made = FOUND[key], cells.make(MODELS[model], MACHINES[machine], work)
    assert (made.topology, made.mesh) == (found.topology, found.mesh)
    assert made.peak == pytest.approx(found.peak, rel=0.02)
    assert made.seconds == pytest.approx(found.seconds, rel=0.02)
    assert made.price == pytest.approx(found.price, rel=0.02)
